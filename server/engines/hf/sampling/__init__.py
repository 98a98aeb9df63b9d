"""From logits to tokens: adjustments requested by clients, grammar masks, and random draws."""
