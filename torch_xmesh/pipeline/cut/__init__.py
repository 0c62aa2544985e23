"""A model cut into stages: capture as a graph, partition, what the stages cost."""
