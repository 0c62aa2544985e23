"""How a model becomes a graph: one forward of a copy of it is recorded."""
