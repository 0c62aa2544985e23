"""How much of this machine's CPU time its hypervisor gave to other machines: what a figure on a shared host may suffer
from without any process here to blame."""

from pathlib import Path

DISTURBED = 0.03
"""A timed run with a larger share is measured again."""
ATTEMPTS = 3
"""Runs at most, repeats included; the one that lost least counts."""

_STOLEN = 8
"""The field of /proc/stat; the fields from 1 to this one are all kinds of time (proc_stat(5))."""


class StolenTime:
    """The share of the time of all cores that was stolen since this was made."""

    def __init__(self) -> None:
        self._stolen, self._all = _ticks()

    def share(self) -> float:
        """From 0 to 1; 0 where the system does not tell."""
        stolen, everything = _ticks()
        return (stolen - self._stolen) / max(1, everything - self._all)


def _ticks() -> tuple[int, int]:
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return 0, 0
    times = [int(field) for field in fields[1 : _STOLEN + 1]]
    return (times[-1] if len(times) == _STOLEN else 0), sum(times)
