"""Who may ask: API keys, the tenants they stand for, what each tenant may use, and the middleware that asks."""
