"""/v1/messages, Anthropic's API: ``protocol`` (bodies), ``conversion`` (to a chat), ``output``, ``service``."""
