"""What a place runs: stages, or the segments of those that have some."""

import itertools
from collections.abc import Iterator, Sequence


class Units:
    """Numbers of segments among those of all stages; a stage that is not divided is one.

    Args:
        counts: by stage its segments.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self._counts = list(counts)
        self._begins = [0, *itertools.accumulate(counts)]

    @property
    def counts(self) -> list[int]:
        """By stage; empty where none is divided."""
        return self._counts if max(self._counts) > 1 else []

    def of(self, stage: int) -> range:
        """Those of a stage."""
        return range(self._begins[stage], self._begins[stage + 1])

    def of_stages(self, stages: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Their numbers, each with its stage and its place in that."""
        for stage in stages:
            for place, unit in enumerate(self.of(stage)):
                yield unit, stage, place
