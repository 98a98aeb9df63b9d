"""The demo model: its sources and its conversion to safetensors."""
