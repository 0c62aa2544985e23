"""The table of schedules in the docs: its formulas and its simulated columns are what the simulator says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import torch_xmesh as xm

PAGE = Path(__file__).resolve().parents[2] / "docs" / "schedules.md"
PLACES: dict[str, Callable[[int], list[int]]] = {
    "n": lambda p: list(range(p)),
    "p, in turn": lambda p: [*range(p), *range(p)],
    "p, in a V": lambda p: [*range(p), *reversed(range(p))],
}
LINES = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
ROWS = [[cell.strip(" `") for cell in line.strip("| ").split("|")] for line in LINES]


def most(schedule: xm.Schedule, begins: str, ends: str) -> int:
    """The most microbatches of a place, for each of its stages, between these kinds of actions."""
    peak = 0
    for place in range(schedule.num_places):
        now = 0
        for action in schedule.actions(place):
            kind = next(letter for letter in action if letter.isalpha())
            now += (kind in begins) - (kind in ends)
            peak = max(peak, now)
    return peak


def figures(name: str, kind: str, p: int, m: int) -> list[int]:
    """Bubble, in flight, held, messages."""
    places = PLACES[kind](p)
    schedule = xm.Schedule.make(name, len(places), m, place_of_stage=places)
    stage = xm.StageCosts(forward_seconds=1.0, backward_input_seconds=1.0, backward_weight_seconds=1.0)
    played = xm.simulate(schedule, xm.Costs.uniform(len(places), stage=stage))
    bubble = played.makespan_seconds - 3 * m * len(places) // p
    return [round(bubble), most(schedule, "F", "BW"), most(schedule, "I", "W"), len(played.transfers)]


def value(formula: str, p: int, m: int) -> int:
    """ "2(n - 1)m" as a number, T as 1."""
    text = re.sub(r"(?<=[\d)npmT])(?=[(npmT])", "*", formula.replace(" ", ""))
    return int(eval(text, {"__builtins__": {}}, {"n": p, "p": p, "m": m, "T": 1}))


def test_every_schedule_has_a_row() -> None:
    assert sorted(row[0] for row in ROWS) == sorted(xm.Schedule.names())


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_row(row: list[str]) -> None:
    name, kind, bubble, in_flight, messages, *simulated = row
    assert figures(name, kind, 4, 16) == [int(cell) for cell in simulated]
    for p, m in ((2, 8), (3, 12), (4, 16), (5, 20)):
        found = figures(name, kind, p, m)
        assert [value(formula, p, m) for formula in (in_flight, messages)] == [found[1], found[3]]
        most_idle = value(bubble.removeprefix("at most "), p, m)
        assert found[0] <= most_idle if bubble.startswith("at most") else found[0] == most_idle
