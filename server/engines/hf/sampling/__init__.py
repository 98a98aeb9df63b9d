"""From logits to tokens: what a request asks of them, grammars, draws."""
