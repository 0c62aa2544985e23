"""Reshards and their plans: layouts, what is measured, rivals, ranks, records."""
