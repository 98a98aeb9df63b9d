"""The plan of one model and deployment: completed flags, weights, pipeline stages, memory terms and verdict."""
