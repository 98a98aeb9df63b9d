"""Text at the API's edge: tokens, chat templates, tool calls."""
