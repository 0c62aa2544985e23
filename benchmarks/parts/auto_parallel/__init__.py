"""Automatic plans that run: models on paced devices, ranks, records."""
