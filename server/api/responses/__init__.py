"""/v1/responses: protocol (bodies), service (logic and events), router (HTTP). Nothing is stored."""
