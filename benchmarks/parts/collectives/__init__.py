"""Collectives on one mesh, by reshards and by gloo."""
