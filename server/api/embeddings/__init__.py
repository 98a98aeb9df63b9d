"""/v1/embeddings: protocol (bodies), service (logic), router (HTTP)."""
