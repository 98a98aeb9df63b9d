"""/v1/chat/completions: ``protocol`` (bodies), ``prompt`` (messages to tokens), ``service`` (logic)."""
