"""The plan of one model and deployment: completed flags, weights, pipeline stages, terms and the verdict."""
