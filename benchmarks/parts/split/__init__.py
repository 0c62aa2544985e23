"""Backwards in two halves: models, measuring, records."""
