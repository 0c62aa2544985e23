"""Why a recording ends: it cannot be made, or must start over in another way."""

READY_STAGES = "pass ready stage modules (a list of modules as model)"
"""What helps where a model cannot be recorded."""


class CaptureError(ValueError):
    """A model cannot be recorded: the message has module, line, reason and what helps."""


class StartOverError(Exception):
    """Not to be seen by users: the recording starts over."""


class LeafFailedError(StartOverError):
    """A module that is not looked into raised `error` on fakes; `where` is the line that called it."""

    def __init__(self, kind: type, name: str, error: Exception, where: str) -> None:
        super().__init__(str(error))
        self.kind, self.name, self.error, self.where = kind, name, error, where


class LookInsideError(StartOverError):
    """The insides of a module matter to what is outside of it, as `reason` says, noticed at `where`.

    Attributes:
        maker: a module inside of it whose result came out in another way than as the outer one's, if it was one's.
        leaf: the outer module, None where that is unknown.
    """

    def __init__(self, reason: str, where: str, *, maker: str | None = None, leaf: str | None = None) -> None:
        super().__init__(f"{reason}, at {where}")
        self.reason, self.where, self.maker, self.leaf = reason, where, maker, leaf


class FakeNeededError(StartOverError):
    """A fake was written into a real tensor, which a node of this name made: that one must be fake too."""

    def __init__(self, node: str) -> None:
        super().__init__(node)
        self.node = node
