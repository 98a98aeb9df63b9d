"""The server: settings, engines, the OpenAI API, metrics and the commands that use them."""
