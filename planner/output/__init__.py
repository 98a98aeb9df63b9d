"""A plan as text, JSON, tables, a page, and as the settings of a deployment."""
