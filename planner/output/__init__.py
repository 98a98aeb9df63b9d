"""Output of a plan: terminal text, tables, JSON, and settings of a deployment."""
