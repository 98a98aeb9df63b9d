"""The sub-commands that load a model or ask a server: each module has ``run(argv) -> exit code``."""
