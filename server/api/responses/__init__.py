"""/v1/responses: protocol (bodies), service (logic and events). Nothing is stored."""
