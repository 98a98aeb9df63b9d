"""The demo model: where it comes from and how it is converted."""
