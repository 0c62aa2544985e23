"""Whether ranks compute the same where they must: compared before it first runs."""

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from torch_xmesh.pipeline.cut.ways import Ways
from torch_xmesh.pipeline.ranks.transfers import Transfers

_MOST_KNOWN = 1024

_ADVICE = (
    "Python iterates over sets of strings in another order in each process: start all ranks with the same "
    "PYTHONHASHSEED (PYTHONHASHSEED=0 torchrun ...), or iterate over sorted(...)"
)


class WayComparison:
    """Compares what ranks have recorded, each situation once. All ranks call it together."""

    def __init__(self, transfers: Transfers, ways: Ways) -> None:
        self._transfers, self._ways = transfers, ways
        self._known: dict[str, tuple[str, int]] = {}  # digest, and who was first to tell it, by situation

    def has_news(self, among: Collection[str]) -> bool:
        """This rank has recorded what it has not told yet, for some of these situations."""
        return bool(self._ways.news(among))

    def compare(
        self,
        among: Collection[str] | None = None,
        failure: str | None = None,
        numbers: Mapping[str, int] | None = None,
        texts: Mapping[str, str] | None = None,
    ) -> None:
        """Tells the others what is new here, of these situations or of all; or why this rank can record nothing.

        Args:
            numbers: that ranks which have them must have alike, by name.
            texts: by name, what a person is told of a difference, where the name does not say it.

        Raises:
            ValueError: on every rank, where one fails, or two compute something else in the same situation.
        """
        told = list(
            zip(
                self._transfers.ranks,
                self._transfers.gather("ways", (failure, self._ways.news(among), numbers or {})),
                strict=True,
            )
        )
        for rank, (text, _, _) in told:
            if text is not None:
                raise ValueError(f"rank {rank} refused the step: {text}")
        first: dict[str, tuple[int, int]] = {}
        for rank, (_, _, found) in told:
            for name, number in found.items():
                if first.setdefault(name, (number, rank))[0] != number:
                    raise ValueError(f"ranks {first[name][1]} and {rank} disagree: {(texts or {}).get(name, name)}")
        known = dict(self._known)
        for rank, (_, news, _) in told:
            for situation, digest in news.items():
                other = known.setdefault(situation, (digest, rank))
                if other[0] != digest:
                    self._refuse(situation, other[1], rank)
        self._known = dict(list(known.items())[-_MOST_KNOWN:])
        self._ways.told(list(self._ways.news(among)))

    def _refuse(self, situation: str, first: int, second: int) -> None:
        told = dict(
            zip(self._transfers.ranks, self._transfers.gather("lines", self._ways.lines(situation)), strict=True)
        )
        difference = _difference(told[first], told[second], (first, second))
        raise ValueError(f"ranks disagree on what the model's forward does: {difference}")


def _difference(lines: Sequence[str], other: Sequence[str], ranks: tuple[int, int]) -> str:
    pairs = itertools.zip_longest(lines, other, fillvalue="nothing")
    mine, theirs = next(((a, b) for a, b in pairs if a != b), ("something else", "something else"))
    text = f"on rank {ranks[0]} {mine}, on rank {ranks[1]} {theirs}"
    is_reordered = Counter(map(_without_name, lines)) == Counter(map(_without_name, other))
    return f"{text}. They do the same in another order. {_ADVICE}" if is_reordered else f"{text}. {_ADVICE}"


def _without_name(line: str) -> str:
    return line.partition(" = ")[2].partition(" ")[2].split(" ", 1)[0]
