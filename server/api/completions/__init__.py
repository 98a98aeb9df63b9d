"""/v1/completions: ``protocol`` (bodies) and ``service`` (logic)."""
