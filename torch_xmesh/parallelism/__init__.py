"""Automatic plans: how a model's operators are sharded over a mesh, found by search."""
