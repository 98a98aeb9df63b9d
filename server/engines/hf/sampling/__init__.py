"""Sampling: adjustments of logits that requests ask for, grammar masks, and random draws of tokens."""
