"""API keys, the tenants they identify, the quotas of each tenant, and the middleware that checks them."""
