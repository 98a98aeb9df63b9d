"""/v1/embeddings: ``protocol`` (bodies) and ``service`` (logic)."""
