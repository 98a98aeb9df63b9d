"""The prefix cache: which blocks hold which tokens, who may share them, what a hit costs."""
