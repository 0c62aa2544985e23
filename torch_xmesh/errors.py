"""Exceptions that a user may want to catch."""

from collections.abc import Sequence


class PeerError(RuntimeError):
    """A rank that a reshard needed is gone, stopped or silent.

    Attributes:
        ranks: the global ranks to blame, ascending; empty when no single one can be named.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)

    def __reduce__(self) -> tuple[type["PeerError"], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.ranks)
