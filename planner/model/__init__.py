"""A model's config and what follows from it alone: tensors, what each layer caches, the layout of a pool."""
