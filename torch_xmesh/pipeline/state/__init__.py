"""Parameters, gradients, optimizer states and seeds of stages, kept equal where copies are, saved and loaded."""
