"""/v1/completions: protocol (bodies), service (logic), router (HTTP)."""
