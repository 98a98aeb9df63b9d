"""/pooling and /classify: ``protocol`` (bodies) and ``service`` (logic)."""
