"""Schedules: which place of a pipeline computes what in which order."""

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from torch_xmesh import _C
from torch_xmesh.arguments import MOST_MICROBATCHES, MOST_STAGES, instance_of, int_list, positive_int, read_text

Edge = tuple[int, int]


_TORCHS = {"interleavedzerobubble": "interleavedzb", "zbvzerobubble": "zbv"}


def schedule_name(given: object) -> str:
    """The name of a schedule that is called by ours or by torch.distributed.pipelining's name, class or object.

    Raises:
        ValueError: neither has such a schedule.
    """
    kind = given if isinstance(given, type) else type(given)
    is_torchs = kind.__module__.startswith("torch.distributed.pipelining")
    if not isinstance(given, str) and not is_torchs:
        raise ValueError(
            f"a schedule is a name, a CSV, an xm.Schedule or a class of torch.distributed.pipelining, got {given!r}"
        )
    text = kind.__name__ if is_torchs else str(given)
    plain = "".join(letter for letter in text.lower().removeprefix("schedule") if letter.isalnum())
    ours = {name.replace("_", ""): name for name in Schedule.names()}
    plain = _TORCHS.get(plain, plain)
    if plain in ours:
        return ours[plain]
    if plain == "dualpipev":
        raise ValueError(
            f"schedule {text} overlaps a forward with a backward inside one action, which this engine does not: 'zb_v' "
            "has the same places; a CSV of it runs with each pair one after the other"
        )
    if plain == "duplex":
        raise ValueError(
            "schedule 'duplex' is an order of segments, which a plan's stages have: pass it to plan_parallel or presets"
        )
    known = ", ".join(map(repr, Schedule.names()))
    close = difflib.get_close_matches(plain, list(ours), n=1)
    hint = f"; did you mean {ours[close[0]]!r}?" if close else ""
    raise ValueError(f"unknown schedule {text!r}: expected one of {known}{hint}")


class Schedule:
    """An immutable schedule. ``str(schedule)`` is a grid: a row per place, ``F`` forward, ``B`` backward (``I`` input
    and ``W`` weight gradients where it is split), the microbatch behind it, ``.`` idle.

    A place is one position of the pipeline: the ranks of one stage's mesh, or of several stages where they share it. It
    runs its actions strictly in order. Made by :meth:`make` or :meth:`from_csv`; equality looks at the cells,
    not at the name.
    """

    __slots__ = ("core",)

    def __init__(self, core: "_C.Schedule") -> None:
        self.core = core

    @classmethod
    def make(
        cls, name: str, num_stages: int, num_microbatches: int, *, place_of_stage: Sequence[int] | None = None
    ) -> "Schedule":
        """A schedule by name, one of :meth:`names`.

        Args:
            name: for example ``"eager_1f1b"``; also as torch.distributed.pipelining calls it, ``"1F1B"`` or
                ``Schedule1F1B``.
            num_stages: positive.
            num_microbatches: positive; fewer than stages will do.
            place_of_stage: one place per stage, numbered from 0, in any pattern; stage s is on place s without it.

        Raises:
            ValueError: an unknown name, or places that are not numbered 0 to their count, each with a stage.
        """
        positive_int("num_stages", num_stages, MOST_STAGES)
        positive_int("num_microbatches", num_microbatches, MOST_MICROBATCHES)
        if place_of_stage is not None:
            place_of_stage = int_list("place_of_stage", place_of_stage)
        if place_of_stage is not None and len(place_of_stage) != num_stages:
            raise ValueError(
                f"a schedule has one place per stage, got {len(place_of_stage)} places for {num_stages} stages"
            )
        return cls(_C.make_schedule(schedule_name(name), num_stages, num_microbatches, list(place_of_stage or ())))

    @staticmethod
    def names() -> list[str]:
        """The schedules that :meth:`make` knows."""
        names: list[str] = _C.schedule_names()
        return names

    @classmethod
    def from_csv(cls, source: str | Path, *, name: str = "csv") -> "Schedule":
        """Reads torch's action notation: one row per place, cells such as ``2F0`` joined by commas, empty where idle.
        An order of segments has cells such as ``2.14F0``: of stage 2, segment 14.

        Args:
            source: the text, or the ``Path`` of a file.
            name: what the schedule is called in messages.

        Raises:
            ValueError: a cell that is no action (its place and cell are named), a stage on two places, a stage without
                actions. The order is checked by :meth:`validate`.
        """
        text = read_text(source, "a schedule") if isinstance(source, Path) else source
        instance_of("source", text, str, "the text of a schedule, or the Path of its file")
        instance_of("name", name, str, "a str")
        if text.endswith(".csv"):
            raise ValueError(f"source is the text of a schedule; of a file it is its Path: Path({text!r})")
        return cls(_C.schedule_from_csv(text, name))

    def to_csv(self, path: str | Path | None = None) -> str:
        """What :meth:`from_csv` and torch.distributed.pipelining read; also written to ``path`` where given."""
        text: str = self.core.to_csv()
        if path is not None:
            Path(path).write_bytes(text.encode())
        return text

    @property
    def name(self) -> str:
        """What it is called in messages."""
        name: str = self.core.name
        return name

    @property
    def num_stages(self) -> int:
        """Stages, over all places."""
        count: int = self.core.num_stages
        return count

    @property
    def num_segments(self) -> tuple[int, ...]:
        """By stage into how many segments its actions are divided; 1: they are whole. A segment is what a stage of a
        plan computes between transfers among its devices."""
        return tuple(self.core.num_segments)

    @property
    def num_microbatches(self) -> int:
        """Microbatches per step."""
        count: int = self.core.num_microbatches
        return count

    @property
    def num_places(self) -> int:
        """Rows of the grid."""
        count: int = self.core.num_places
        return count

    @property
    def place_of_stage(self) -> tuple[int, ...]:
        """One place per stage."""
        return tuple(self.core.place_of_stage)

    @property
    def peak_in_flight(self) -> list[int]:
        """By stage: the most microbatches whose activations are held at once (from F to the end of B, or of W)."""
        peak: list[int] = self.core.peak_in_flight
        return peak

    def actions(self, place: int) -> list[str]:
        """A place's actions in order, in torch's notation (``"2F0"``), without idle cells; of segment 14 of a stage
        that is divided ``"2.14F0"``.

        Raises:
            ValueError: no such place.
        """
        if not 0 <= place < self.num_places:
            raise ValueError(f"place {place} is outside 0..{self.num_places - 1}")
        actions: list[str] = self.core.actions(place)
        return actions

    def validate(self, edges: Iterable[Edge] | None = None, *, forward_only: bool = False) -> None:
        """Checks that it is complete, ordered and free of deadlock, with buffered sends and with in-order rendezvous
        per edge and direction.

        Args:
            edges: (earlier stage, later stage) for every value that crosses, skip connections too; the chain of stages
                without it.
            forward_only: every F and no backward, as in an evaluation.

        Raises:
            ValueError: with the grid around the bad cell, which stands between > and <.
        """
        pairs = chain_edges(self.num_stages) if edges is None else edges
        self.core.validate([(start, end, True) for start, end in pairs], forward_only)

    def __str__(self) -> str:
        return str(self.core)

    def __repr__(self) -> str:
        return (
            f"Schedule({self.name!r}, num_stages={self.num_stages}, num_places={self.num_places}, "
            f"num_microbatches={self.num_microbatches})"
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and bool(self.core == other.core)

    def __hash__(self) -> int:
        return hash(self.to_csv())

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return _unpickled, (self.to_csv(), self.name)


def _unpickled(text: str, name: str) -> Schedule:
    return Schedule.from_csv(text, name=name)


def chain_edges(num_stages: int) -> list[Edge]:
    """Each stage to the next one."""
    return [(stage, stage + 1) for stage in range(num_stages - 1)]
