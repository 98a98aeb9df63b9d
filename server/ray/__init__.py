"""Replicas of an engine on several machines behind one API, on Ray Serve."""
