"""What the recordings of a model compute, kept for ranks to compare before they run them."""

from collections.abc import Collection, Iterable, Sequence

from torch_xmesh.pipeline.capture.recording import Recording

_MOST_KEPT = 256


class Ways:
    """Recordings by situation: sizes, modes, and what is read of the inputs' values. In one situation all ranks must
    compute the same, whichever of them are in it."""

    def __init__(self) -> None:
        self._lines: dict[str, Sequence[str]] = {}
        self._digests: dict[str, str] = {}
        self._untold: dict[str, None] = {}

    def add(self, sizes_and_modes: str, recording: Recording) -> str:
        """A recording that may be run once its situation, which is returned, was told."""
        situation = f"{sizes_and_modes}\n{recording.way}"
        self._lines[situation] = recording.lines
        self._digests[situation] = recording.digest
        self._untold[situation] = None
        while len(self._lines) > _MOST_KEPT:
            oldest = next(iter(self._lines))
            for kept in (self._lines, self._digests, self._untold):
                kept.pop(oldest, None)
        return situation

    def news(self, among: Collection[str] | None = None) -> dict[str, str]:
        """What was not told yet, of some situations or of all: digests by situation."""
        return {
            situation: self._digests[situation] for situation in self._untold if among is None or situation in among
        }

    def told(self, situations: Iterable[str]) -> None:
        """All ranks know of them."""
        for situation in situations:
            self._untold.pop(situation, None)

    def lines(self, situation: str) -> Sequence[str]:
        """What is computed in a situation; nothing where that is not known any more."""
        return self._lines.get(situation, ())
