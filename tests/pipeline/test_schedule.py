"""Schedules and their simulation from Python; torch's own schedules and notation as the judge."""

import csv
import io
import itertools
import math
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from torch_xmesh.palette import ACTIONS
from torch_xmesh.pipeline import Costs, EdgeCosts, Schedule, StageCosts, simulate
from torch_xmesh.pipeline.engine.auto import first_schedule
from torch_xmesh.pipeline.engine.setup import schedule_of


def torch_rows(text: str) -> list[list[Any]]:
    """The cells of a CSV as torch reads them."""
    return [[torch_schedules._Action.from_str(cell) for cell in row] for row in csv.reader(io.StringIO(text))]


def torch_interleaved(num_places: int, per_place: int, num_microbatches: int) -> list[list[str]]:
    """The lists of torch's ScheduleInterleaved1F1B, idle cells dropped."""
    rounds = max(1, num_microbatches // num_places)
    maker: Any = SimpleNamespace(
        n_local_stages=per_place,
        microbatches_per_round=num_microbatches // rounds,
        pp_group_size=num_places,
        _n_microbatches=num_microbatches,
    )
    calculate = torch_schedules.ScheduleInterleaved1F1B._calculate_single_rank_operations
    return [[str(action) for action in calculate(maker, rank) if action is not None] for rank in range(num_places)]


class TorchStage:
    """What torch's schedules ask of a stage before they run."""

    def __init__(self, index: int, places: list[int]) -> None:
        self.stage_index, self.num_stages = index, len(places)
        self.is_first, self.is_last = index == 0, index == len(places) - 1
        self.group_rank, self.group_size = places[index], max(places) + 1
        self.stage_index_to_group_rank = dict(enumerate(places))
        self.has_backward, self.submod, self.group, self.device = True, torch.nn.Linear(1, 1), None, torch.device("cpu")


def torch_csv(kind: Any, places: list[int], num_microbatches: int, folder: Path) -> str:
    """The file of a schedule that torch's class writes; those of one stage per rank (GPipe, 1F1B) write none."""
    stages: Any = [TorchStage(index, places) for index, place in enumerate(places) if place == 0]
    kind(stages, num_microbatches)._dump_csv(str(folder / "torch.csv"), format="compute_only")
    return (folder / "torch.csv").read_text()


CYCLIC, VEE, LINE = [0, 1, 2, 0, 1, 2], [0, 1, 2, 2, 1, 0], [0, 1, 2]
TORCHS = [
    (torch_schedules.ScheduleInterleaved1F1B, CYCLIC, "interleaved_1f1b"),
    (torch_schedules.ScheduleLoopedBFS, CYCLIC, "looped_bfs"),
    (torch_schedules.ScheduleInterleavedZeroBubble, LINE, "zb_h1"),
    (torch_schedules.ScheduleInterleavedZeroBubble, CYCLIC, "interleaved_zb"),
    (torch_schedules.ScheduleZBVZeroBubble, VEE, "zb_v"),
    (torch_schedules.ScheduleDualPipeV, VEE, "zb_v"),
]


@pytest.mark.parametrize(("kind", "places", "ours"), TORCHS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_every_file_of_torchs_loads_and_ours_is_no_slower(
    kind: Any, places: list[int], ours: str, tmp_path: Path
) -> None:
    theirs = Schedule.from_csv(torch_csv(kind, places, 6, tmp_path))
    theirs.validate()
    assert theirs.place_of_stage == tuple(places)
    mine = Schedule.make(ours, len(places), 6, place_of_stage=places)
    stage = StageCosts(forward_seconds=1.0, backward_input_seconds=1.0, backward_weight_seconds=1.0)
    costs = Costs.uniform(len(places), stage=stage)
    assert simulate(mine, costs).makespan_seconds <= simulate(theirs, costs).makespan_seconds
    assert max(mine.peak_in_flight) <= max(theirs.peak_in_flight)
    if kind in (torch_schedules.ScheduleLoopedBFS, torch_schedules.ScheduleZBVZeroBubble):
        assert [mine.actions(place) for place in range(3)] == [theirs.actions(place) for place in range(3)]


def test_grid() -> None:
    assert str(Schedule.make("eager_1f1b", 2, 3)) == (
        "eager_1f1b: 2 stages on 2 places, 3 microbatches\n"
        "stage 0 | F0 F1 F2 B0 .  B1 .  B2\n"
        "stage 1 | .  F0 B0 F1 B1 F2 B2\n"
    )


@pytest.mark.parametrize("num_places", [1, 2, 3, 4])
@pytest.mark.parametrize("per_place", [1, 2, 3])
@pytest.mark.parametrize("rounds", [0, 1, 2, 3])
def test_interleaved_is_torchs_where_torch_has_one(num_places: int, per_place: int, rounds: int) -> None:
    num_microbatches = rounds * num_places or 1
    places = [stage % num_places for stage in range(num_places * per_place)]
    schedule = Schedule.make("interleaved_1f1b", len(places), num_microbatches, place_of_stage=places)
    expected = torch_interleaved(num_places, per_place, num_microbatches)
    assert [schedule.actions(place) for place in range(num_places)] == expected


@pytest.mark.parametrize("name", Schedule.names())
def test_torch_reads_and_validates_our_csv(name: str) -> None:
    schedule = Schedule.make(name, 4, 6)
    rows = torch_rows(schedule.to_csv())
    places = torch_schedules._validate_schedule(dict(enumerate(rows)), 4, 4, 6)
    assert places == {0: 0, 1: 1, 2: 2, 3: 3}
    assert [[str(cell) for cell in row if cell] for row in rows] == [schedule.actions(place) for place in range(4)]


@hypothesis.given(
    name=st.sampled_from(Schedule.names()),
    raw=st.lists(st.integers(0, 3), min_size=1, max_size=8),
    num_microbatches=st.integers(1, 9),
)
def test_torch_plays_every_schedule_on_any_places(name: str, raw: list[int], num_microbatches: int) -> None:
    """Torch checks that F comes before B, and its simulator plays all lists to their ends: each action once."""
    places = [sorted(set(raw)).index(place) for place in raw]
    schedule = Schedule.make(name, len(places), num_microbatches, place_of_stage=places)
    schedule.validate()
    rows = dict(enumerate(torch_rows(schedule.to_csv())))
    torch_schedules._validate_schedule(rows, len(rows), len(places), num_microbatches)
    lists = {place: [cell for cell in row if cell is not None] for place, row in rows.items()}
    sends = torch_schedules._add_send_recv(lists, lambda stage: places[stage], len(places))
    played = torch_schedules._simulate_comms_compute(sends, lambda stage: places[stage], len(places))
    done = sorted(str(cell) for row in played.values() for cell in row if cell is not None)
    kinds = "FIW" if "0I0" in done else "FB"
    everything = [f"{s}{kind}{m}" for s in range(len(places)) for m in range(num_microbatches) for kind in kinds]
    assert [cell for cell in done if "_" not in cell] == sorted(everything)


def test_autos_first_step_splits_backwards() -> None:
    """So that F, I and W are measured; under a limit with one microbatch in flight."""
    for places in ([0, 1, 2], [0, 1, 0, 1], [0, 1, 1, 0], [0, 0, 1, 1]):
        for limit, peak in ((None, max(places) * 2 + 2), (1, 1)):
            schedule = first_schedule(places, 16, limit)
            schedule.validate()
            assert any("I" in action for action in schedule.actions(0))
            assert max(schedule.peak_in_flight) <= peak


def test_csv_round_trip(tmp_path: Path) -> None:
    schedule = Schedule.make("1f1b", 3, 5)
    schedule.to_csv(tmp_path / "schedule.csv")
    assert Schedule.from_csv(tmp_path / "schedule.csv") == schedule
    assert Schedule.from_csv(schedule.to_csv()) == schedule
    assert hash(Schedule.from_csv(schedule.to_csv())) == hash(schedule)
    copy = pickle.loads(pickle.dumps(schedule))
    assert (copy, copy.name) == (schedule, "1f1b")


def test_wrong_use() -> None:
    with pytest.raises(ValueError, match="expected one of 'gpipe', '1f1b'"):
        Schedule.make("2f2b", 2, 2)
    with pytest.raises(ValueError, match="num_microbatches must be a positive int, got -1"):
        Schedule.make("1f1b", 2, -1)
    with pytest.raises(ValueError, match="1 places for 2 stages"):
        Schedule.make("1f1b", 2, 2, place_of_stage=[0])
    with pytest.raises(ValueError, match="place 0, cell 1: '0Z0'"):
        Schedule.from_csv("0F0,0Z0")
    with pytest.raises(ValueError, match="outside 0..1"):
        Schedule.make("1f1b", 2, 2).actions(2)


def test_validate_marks_the_cell() -> None:
    schedule = Schedule.from_csv("0F0,0F1,0B0,0B1\n1F1,1F0,1B0,1B1\n")
    with pytest.raises(ValueError, match=r"in-order rendezvous(.|\n)*>F1<"):
        schedule.validate()
    schedule.validate(edges=[])
    Schedule.from_csv("0F0\n1F0\n").validate(forward_only=True)
    with pytest.raises(ValueError, match=r"0B0 \(or 0I0 and 0W0\) is missing"):
        Schedule.from_csv("0F0\n1F0\n").validate()


def test_an_engine_takes_a_schedule_as_it_is() -> None:
    whole = Schedule.make("1f1b", 2, 2)
    assert schedule_of(whole, [0, 1], 2) is whole
    split = "0F0,0F1,0B0,0B1\n1F0,1I0,1F1,1W0,1B1\n"
    assert schedule_of(split, [0, 1], 2) == Schedule.from_csv(split)


def test_simulate() -> None:
    stage = StageCosts(forward_seconds=1.0, backward_input_seconds=1.0, backward_weight_seconds=1.0)
    simulation = simulate(Schedule.make("1f1b", 4, 8), Costs.uniform(4, stage=stage))
    assert simulation.makespan_seconds == 33.0
    assert simulation.bubble_fraction == pytest.approx(3 / 11)
    assert simulation.busy_seconds == [24.0] * 4
    assert simulation.peak_in_flight == [4, 3, 2, 1]
    assert len(simulation.actions) == 64
    assert len(simulation.transfers) == 48
    assert simulation.actions[0] == (0, "0F0", 0.0, 1.0)
    assert simulate(Schedule.make("1f1b", 4, 8), Costs(stages=[stage] * 4)).makespan_seconds == 33.0


def test_simulate_edges() -> None:
    stage = StageCosts(forward_seconds=1.0, backward_seconds=2.0)
    schedule = Schedule.make("1f1b", 2, 2)
    timed = Costs(stages=[stage] * 2, edges={(0, 1): 1.0})
    in_bytes = Costs(stages=[stage] * 2, edges={(0, 1): EdgeCosts(forward_bytes=100)}, nic_bytes_per_s=100.0)
    assert simulate(schedule, timed).makespan_seconds == simulate(schedule, in_bytes).makespan_seconds == 11.0
    assert simulate(schedule, Costs.uniform(2, stage=stage, edge=1.0, overlap=False)).makespan_seconds == 12.0
    with pytest.raises(ValueError, match="nic_bytes_per_s must be positive"):
        simulate(schedule, Costs(stages=[stage] * 2, edges={(0, 1): EdgeCosts(forward_bytes=1)}))
    with pytest.raises(ValueError, match="expected 2 stages, got 1"):
        simulate(schedule, Costs(stages=[stage]))


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    stage = StageCosts(forward_seconds=1.0, backward_seconds=2.0)
    schedule = Schedule.make("interleaved_1f1b", 4, 4, place_of_stage=[0, 1, 0, 1])
    path = tmp_path / "timeline.png"
    simulated = simulate(schedule, Costs.uniform(4, stage=stage, edge=0.5))
    simulated.plot(path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    simulated.plot(tmp_path / "timeline.svg")
    drawn = (tmp_path / "timeline.svg").read_text()
    assert all(f"<!-- {text} -->" in drawn for text in ("forward", "sent (thin)", "received (thin)", "s, simulated"))
    assert "<!-- 1.3: stage 1, microbatch 3 -->" in drawn


def test_actions_have_colors_that_differ() -> None:
    colors = [[int(color[at : at + 2], 16) for at in (1, 3, 5)] for _, color in ACTIONS.values()]
    assert min(math.dist(*pair) for pair in itertools.combinations(colors, 2)) > 40
