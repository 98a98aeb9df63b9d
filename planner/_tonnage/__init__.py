"""The package `tonnage` itself.

The checkout has no folder of that name. The file pyproject.toml maps `tonnage` to this folder. It maps
`tonnage.planner`, `tonnage.cache` and `tonnage.server` to the folders planner, cache and server.
"""

__version__ = "0.1.0"
