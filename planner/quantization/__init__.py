"""How weights are stored: formats, which modules they apply to, what a checkpoint's config says of them."""
