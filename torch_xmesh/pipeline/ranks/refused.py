"""A refusal that all ranks of a pipeline know of."""


class StepRefusedError(Exception):
    """No rank has begun the step, or what else all do together; all of them know, and the engine can go on. `reason` is
    what the user gets."""

    def __init__(self, reason: Exception) -> None:
        super().__init__(str(reason))
        self.reason = reason
