"""The sections of planner_accuracy.py, one module each."""
