"""The sub-commands that load a model: each module has ``run(argv) -> exit code``."""
