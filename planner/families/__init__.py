"""One adapter per model family: a checked config in, an :class:`Architecture` out. See ``registry``."""
