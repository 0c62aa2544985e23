"""Exceptions that a user may want to catch."""

from collections.abc import Sequence

_MOST_TEXTS = 256
_ranks_of: dict[str, tuple[int, ...]] = {}  # by text, of the latest failures


def note_ranks(text: str, ranks: Sequence[int]) -> None:
    """For a PeerError that torch makes of its text alone."""
    _ranks_of[text] = tuple(ranks)
    if len(_ranks_of) > _MOST_TEXTS:
        _ranks_of.pop(next(iter(_ranks_of)), None)


class PeerError(RuntimeError):
    """A rank that a reshard needed is gone, stopped or silent.

    Attributes:
        ranks: the global ranks to blame, ascending; empty when no single one can be named.
    """

    def __init__(self, message: str, ranks: Sequence[int] | None = None) -> None:
        super().__init__(message)
        self.ranks = _ranks_of.get(message, ()) if ranks is None else tuple(ranks)

    def __reduce__(self) -> tuple[type["PeerError"], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)


class StageError(RuntimeError):
    """A pipeline stage raised on some rank; every rank of the pipeline gets this, with the original message.

    Attributes:
        stage: which stage, -1 where it is not known.
        microbatch: which microbatch, -1 outside of any.
    """

    def __init__(self, message: str, stage: int = -1, microbatch: int = -1) -> None:
        super().__init__(message)
        self.stage = stage
        self.microbatch = microbatch

    def __reduce__(self) -> tuple[type["StageError"], tuple[str, int, int]]:
        return type(self), (str(self), self.stage, self.microbatch)
