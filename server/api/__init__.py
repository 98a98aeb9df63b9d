"""The OpenAI API: protocol (bodies), service (logic, knows no HTTP), router (thin routes)."""
