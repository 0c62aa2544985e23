"""Automatic plans on paper: how fast they are found, and what they are predicted to reach."""
