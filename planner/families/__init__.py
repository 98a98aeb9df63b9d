"""One adapter per model family: a checked config in, an ``Architecture`` out. See ``registry``."""
