"""The prefix cache: which blocks hold which tokens, which requests may share them, and what a hit costs."""
