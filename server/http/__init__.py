"""HTTP below the API: limits of connections, clients that hang up or do not read, turns of the event loop."""
