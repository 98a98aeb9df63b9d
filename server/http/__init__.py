"""HTTP below the API: protocol limits, clients that hang up, turns of the event loop."""
