"""A model cut into stages: the partition of what was recorded of it, ready stages, what stages cost."""
