"""The formats, a file for each tool that writes them: see ../read.py for what a file holds."""
