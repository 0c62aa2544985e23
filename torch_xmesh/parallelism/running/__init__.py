"""Plans that run: a stage's operators on each device's parts of their tensors, with the plan's collectives between."""
