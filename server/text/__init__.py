"""Conversion between text and tokens: tokenizers, chat templates, grammars and tool calls."""
