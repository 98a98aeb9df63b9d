"""/v1/score and /v1/rerank: ``protocol`` (bodies) and ``service`` (logic)."""
