"""The ranks of a pipeline: their meshes, what they tell each other, their clocks."""
