"""What a server reports about itself: metrics, memory report, status page, logs, request log and traces."""
