"""One module per section of planner_accuracy.py."""
