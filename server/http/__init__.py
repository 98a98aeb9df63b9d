"""HTTP below the API: limits on connections and bodies, slow and disconnected clients, pacing of requests."""
