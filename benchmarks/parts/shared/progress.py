"""What a benchmark says while it measures: where it is, on stderr, and each row of its table as soon as it is measured.

The ranks run in processes of their own; rank 0 tells (`tell`, `tell_rows`), the driver listens (`Listener`).
"""

import io
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO, cast

_PROGRESS = "progress: "
_ROWS = "rows: "
_SECONDS_BETWEEN_LINES = 5.0


def tell(case: str, method: str, run: str, seconds_left: float) -> None:
    """Rank 0 is about to run a method. `seconds_left`: at most so long until the end of all."""
    left = f"at most {seconds_left:.0f} s left" if seconds_left > 0 else "time is up, what must run still runs"
    print(f"{_PROGRESS}{case}, {method}, {run}; {left}", flush=True)


def tell_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Rank 0 has measured these records."""
    print(f"{_ROWS}{json.dumps(rows)}", flush=True)


class Progress:
    """One line on stderr: overwritten on a terminal, else a new one every five seconds at most."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._is_terminal = self._stream.isatty()
        self._last = -_SECONDS_BETWEEN_LINES
        self._is_shown = False

    def say(self, text: str) -> None:
        if self._is_terminal:
            self._stream.write(f"\r\x1b[K{text}")
            self._is_shown = True
        elif time.monotonic() - self._last >= _SECONDS_BETWEEN_LINES:
            self._last = time.monotonic()
            self._stream.write(f"{text}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Before something else is printed, and at the end."""
        if self._is_shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._is_shown = False


class Listener(io.TextIOBase):
    """Where a cluster's ranks print: hands on what rank 0 tells, and keeps the rest to itself. `stream` is it as a
    Cluster's `output`. Threading: the driver's, and then a job's own."""

    def __init__(self, on_rows: Callable[[list[dict[str, Any]]], None], progress: Progress | None = None) -> None:
        self._on_rows = on_rows
        self._progress = Progress() if progress is None else progress

    @property
    def stream(self) -> TextIO:
        return cast(TextIO, self)

    def say(self, text: str) -> None:
        """What the driver itself is about."""
        self._progress.say(text)

    def write(self, text: str) -> int:
        line = text.removeprefix("[rank 0] ")
        if line.startswith(_PROGRESS):
            self._progress.say(line.removeprefix(_PROGRESS))
        elif line.startswith(_ROWS):
            self._progress.clear()
            self._on_rows(json.loads(line.removeprefix(_ROWS)))
        return len(text)

    def end(self) -> None:
        """Nothing more will be told."""
        self._progress.clear()


def ignore_rows(rows: list[dict[str, Any]]) -> None:
    """For those who look at the records at the end."""
