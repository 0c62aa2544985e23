"""A table in the manner of nccl-tests: units in the head, rows as they are measured."""

import os
import sys
from collections.abc import Iterable, Sequence

_NUMBER_WIDTH = 8


def say(text: str) -> None:
    """A line on stdout, at once. Once nobody reads there any more, it and all that follow go nowhere: the measurement
    goes on."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class LiveTable:
    """A table on stdout whose rows are printed as they come. The columns are as wide as the names that are to come and
    the usual numbers need."""

    def __init__(self, head: Sequence[tuple[str, str]], names: Sequence[Sequence[str]]) -> None:
        """`names`: the texts that the first columns may have."""
        self._head = [[name for name, _ in head], [unit for _, unit in head]]
        least = [max(map(len, texts), default=0) for texts in names] + [_NUMBER_WIDTH] * (len(head) - len(names))
        self._widths = [max(width, len(name), len(unit)) for width, name, unit in zip(least, *self._head, strict=True)]
        self._previous: str | None = None

    def begin(self, notes: Iterable[str]) -> None:
        """What is known before the first row; again, where what follows is measured otherwise."""
        self._previous = None
        for note in notes:
            self.note(note)
        for row in self._head:
            say(format_row(row, self._widths, is_head=True))

    def note(self, text: str) -> None:
        say(f"# {text}")

    def rows(self, rows: Iterable[Sequence[str]]) -> None:
        for row in rows:
            if self._previous not in (None, row[0]):
                say("")
            self._previous = row[0]
            say(format_row(row, self._widths, is_head=False))


def format_row(cells: Sequence[str], widths: Sequence[int], is_head: bool) -> str:
    """Two columns of names, then numbers."""
    aligned = [
        cell.ljust(width) if column < 2 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return ("# " if is_head else "  ") + "  ".join(aligned).rstrip()
