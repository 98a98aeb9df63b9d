"""The server: settings, engines, OpenAI API, metrics."""
