"""A model as its config describes it: tensors, what each layer caches, and the layout of the block pool."""
