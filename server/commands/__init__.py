"""The sub-commands that load a model or query a server.

Each module has a function ``run(argv)``, which returns the exit code.
"""
