"""More than one machine: replicas of an engine behind one API, on Ray Serve."""
