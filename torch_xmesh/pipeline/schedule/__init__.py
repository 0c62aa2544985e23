"""Schedules, their simulation, and the pictures of both."""
