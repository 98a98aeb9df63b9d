"""The OpenAI API: protocol (bodies), service (logic, knows no HTTP), one router (their routes)."""
