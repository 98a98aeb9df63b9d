"""What a server tells about itself: metrics, memory report, logs, traces, KV events."""
