"""HTTP below the API: connection limits, disconnected and slow clients, and the rate of starting requests."""
