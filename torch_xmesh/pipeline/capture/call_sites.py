"""Where in a program a call is made: the frames that lead to it, and where each of them was."""

import contextlib
import dis
import functools
import os
import sys
import types
from collections.abc import Iterator
from typing import NamedTuple

_OWN = frozenset(
    os.path.join(os.path.dirname(__file__), f"{name}.py")
    for name in ("call_sites", "recorder", "graph_writer", "told_calls", "node_forms")
)


class CallSite(NamedTuple):
    """A frame on the way to a call.

    Attributes:
        frame: a number that no other run of a function has.
        code: what it runs.
        offset: where in that it was.
    """

    frame: int
    code: types.CodeType
    offset: int


class CallSites:
    """Finds the ways to calls. Threading: that of the forward."""

    def __init__(self) -> None:
        self._known: list[tuple[types.FrameType, int]] = []  # the last call's frames; held, or ids are used again
        self._count = 0
        self._root: types.FrameType | None = None

    @contextlib.contextmanager
    def beginning_here(self) -> Iterator[None]:
        """Inside, ways begin in the caller's frame."""
        self._root = sys._getframe(2)
        try:
            yield
        finally:
            self._known, self._root = [], None

    def here(self) -> tuple[CallSite, ...]:
        """The way to the call that is recorded now, the recorder's own innermost frames left out."""
        frames: list[types.FrameType] = []
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename in _OWN and frame is not self._root:
            frame = frame.f_back
        while frame is not None and frame is not self._root:
            frames.append(frame)
            frame = frame.f_back
        frames.reverse()
        known: list[tuple[types.FrameType, int]] = []
        is_known = True
        for depth, caller in enumerate(frames):
            is_known = is_known and depth < len(self._known) and self._known[depth][0] is caller
            if is_known:
                known.append(self._known[depth])
            else:
                self._count += 1
                known.append((caller, self._count))
        self._known = known
        return tuple(CallSite(number, known_frame.f_code, known_frame.f_lasti) for known_frame, number in known)


@functools.cache
def loops_of(code: types.CodeType) -> tuple[tuple[int, int], ...]:
    """First and last offset of each loop in a function, outer ones first."""
    ends: dict[int, int] = {}
    for instruction in dis.get_instructions(code):
        is_jump = instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs
        if is_jump and isinstance(instruction.argval, int) and instruction.argval <= instruction.offset:
            ends[instruction.argval] = max(ends.get(instruction.argval, 0), instruction.offset)
    return tuple(sorted(ends.items(), key=lambda loop: (loop[0], -loop[1])))
