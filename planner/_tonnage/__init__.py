"""The package ``tonnage`` itself. The checkout has no folder of that name: pyproject.toml maps it to this one,
and planner, cache and server into it."""

__version__ = "0.1.0"
