"""What happened in a step, as trace, picture and table; and what the simulator is told of an engine."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from pipeline_cases import Run, case_of, make_engine
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import torch_xmesh as xm
from torch_xmesh.pipeline.ranks import clocks as pipeline_clocks
from torch_xmesh.pipeline.schedule.timeline import Event, aligned, table
from torch_xmesh.testing import spawn


def trace(rank: int, world_size: int, folder: str) -> str:
    run = Run("mlp", ("layers.2",), ([0, 1], [2]), "eager_1f1b")
    torch.manual_seed(0)
    case = case_of(run.model)
    engine = make_engine(run, case.build())
    args, kwargs, target = case.batch(run.samples)
    for show in (engine.trace, engine.timeline):
        with pytest.raises(ValueError, match="no step has run yet"):
            show(f"{folder}/early.png")
    engine.step(*args, target=target, **kwargs)
    engine.trace(f"{folder}/trace.json")
    engine.timeline(f"{folder}/timeline.png")
    for path, kind, words in (
        (f"{folder}/nowhere/trace.png", OSError, "rank 0 could not write .*nowhere"),
        (f"{folder}/trace.abc", ValueError, "rank 0 could not write .*abc"),
        (7 if rank == 1 else f"{folder}/other.png", ValueError, "path is a str or a pathlib.Path, got int"),
    ):
        with pytest.raises(kind, match=words):
            engine.timeline(path)  # type: ignore[arg-type]
    engine.step(*args, target=target, **kwargs)  # which ends nothing
    text = engine.summary()
    assert str(engine.schedule).count("F") == 8
    engine.close()
    return text


def test_trace_timeline_summary(tmp_path: Path) -> None:
    summaries = spawn(trace, 3, str(tmp_path), timeout=60)
    assert summaries[0] == summaries[1] == summaries[2]
    head, *rows = summaries[0].splitlines()
    assert "after s" in head
    assert len(rows) == 3
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    done = [
        (event["pid"], event["name"])
        for event in events
        if event["ph"] == "X" and not event["name"].startswith(("wait", "between", "drain"))
    ]
    expected = {(rank, f"{rank // 2}{kind}{mb}") for rank in range(3) for kind in "FB" for mb in range(4)}
    expected |= {(rank, name) for rank in range(3) for name in ("before", "losses", "buffers")}
    expected |= {(rank, "gradients") for rank in range(2)}
    assert set(done) == expected
    assert len(done) == len(expected)
    assert sum(event["ph"] == "b" for event in events) == 24
    assert (tmp_path / "timeline.png").stat().st_size > 1000
    _check_causes([event for event in events if event["ph"] != "M"])


def afterwards(rank: int, world_size: int) -> list[str]:
    """What follows the actions on this rank, of a model whose stages share a weight and a norm."""
    engine = make_engine(Run("tied", ("third",), ([0, 1], [2]), "1f1b"), case_of("tied").build())
    args, kwargs, target = case_of("tied").batch(8)
    for number in range(2):
        with engine.no_sync() if number == 0 else contextlib.nullcontext():
            engine.step(*args, target=target, **kwargs)
        if number == 0:
            assert [name for name, _, _ in engine._steps.after] == ["losses", "buffers"]
    names = [name for name, _, _ in engine._steps.after]
    engine.close()
    return names


def test_sums_over_data_shards_and_over_tied_stages_are_told_apart() -> None:
    after = spawn(afterwards, 3, timeout=60)
    assert after == [["gradients", "tied", "losses", "buffers"]] * 2 + [["tied", "losses", "buffers"]]


def _check_causes(events: list[dict[str, Any]]) -> None:
    """On one clock nothing begins before what it follows from has ended, and no receive before its value is sent."""
    at = {(event["pid"], event["name"]): event for event in events if event["ph"] == "X"}
    for microbatch in range(4):
        made = [at[rank, f"0F{microbatch}"] for rank in (0, 1)]
        assert at[2, f"1F{microbatch}"]["ts"] >= max(event["ts"] + event["dur"] for event in made)
        used = at[2, f"1B{microbatch}"]
        assert all(at[rank, f"0B{microbatch}"]["ts"] >= used["ts"] + used["dur"] for rank in (0, 1))
    sent: dict[str, float] = {}
    for event in events:
        if event["ph"] == "b" and event["name"].endswith(" out"):
            name = event["name"].removesuffix(" out")
            sent[name] = min(event["ts"], sent.get(name, event["ts"]))
    received = [event for event in events if event["ph"] == "b" and event["name"].endswith(" in")]
    assert len(received) == 12
    assert all(event["ts"] >= sent[event["name"].removesuffix(" in")] for event in received)
    assert all(event["ts"] == 0 for event in events if event["name"] == "before")


def clocks(rank: int, world_size: int) -> tuple[Any, int]:
    """Ranks 2 and 3 are said to be another machine's, whose clock is 5 s ahead."""
    ahead = 5_000_000_000 if rank >= 2 else 0
    real = time.monotonic_ns
    with (
        mock.patch.object(pipeline_clocks, "machine", return_value="other" if rank >= 2 else "this"),
        mock.patch.object(pipeline_clocks, "now_ns", side_effect=lambda: real() + ahead),
    ):
        engine = make_engine(Run("mlp", ("layers.2",), ([0, 1], [2, 3])), case_of("mlp").build())
        found = pipeline_clocks.clock_offsets(engine._transfers)
    engine.close()
    return dict(found), ahead


def test_clocks_of_machines_are_compared() -> None:
    told = spawn(clocks, 4, timeout=60)
    assert all(found == told[0][0] for found, _ in told)
    for rank, (found, ahead) in enumerate(told):
        offset, error = found[rank]
        assert abs(offset - ahead) <= error
        assert (error == 0) == (rank < 2)


def test_a_late_rank_waits_before_its_first_action() -> None:
    """Two ranks, the second 3 s late on a clock that is 100 s ahead; its receive was posted before the value left."""
    first = [
        Event(0, 0, "compute", "before", 10e9, 11e9),
        Event(0, 0, "compute", "0F0", 11e9, 12e9),
        Event(0, 0, "transfer", "value 0>1 mb0 out", 13.5e9, 14e9),
    ]
    second = [
        Event(1, 1, "compute", "before", 113e9, 113.2e9),
        Event(1, 1, "transfer", "value 0>1 mb0 in", 113.2e9, 114.5e9),
        Event(1, 1, "compute", "wait 1F0", 113.2e9, 114.5e9),
        Event(1, 1, "compute", "1F0", 114.5e9, 115e9),
    ]
    events = aligned([*first, *second], {0: 0, 1: 100_000_000_000})
    found = {(event.rank, event.name): (event.begin, event.end) for event in events}
    assert found[0, "before"] == (0, 1)
    assert found[1, "before"] == pytest.approx((0, 3.2))
    assert found[1, "value 0>1 mb0 in"] == pytest.approx((3.5, 4.5))
    row = table(events).splitlines()[-1].split()
    assert row == ["1", "1", "3.2000", "0.5000", "0.0000", "1.3000", "0.0000", "0.0000", "5.0000"]


class Skipping(nn.Module):
    """Three layers; the first one's result is added to the third one's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        result: torch.Tensor = self.third(self.second(x)) + x
        return result


def told_to_the_simulator(rank: int, world_size: int, hosts: dict[int, int]) -> float:
    """Each edge takes what its reshard is planned to take, on every rank alike."""
    meshes = [xm.Mesh([0, 1]), xm.Mesh([2]), xm.Mesh([2])]
    engine = xm.PipelineEngine(
        Skipping(),
        (torch.empty(4, 16),),
        meshes=meshes,
        split=xm.split_at("second", "third"),
        schedule="gpipe",
        num_microbatches=2,
    )
    topology = xm.Topology(host_of=hosts, nic_bytes_per_s=1 << 20)
    stage = xm.StageCosts(forward_seconds=0.5, backward_seconds=1.0)
    costs = engine.costs([stage] * 3, topology=topology)
    values = xm.Spec((4, 16), torch.float32, meshes[0], (Shard(0),))
    gradients = xm.Spec((4, 16), torch.float32, meshes[1], (Replicate(),))
    there = xm.plan_resharding(values, meshes[1], (Replicate(),), topology=topology).predicted_seconds
    back = xm.plan_resharding(gradients, meshes[0], (Shard(0),), topology=topology).predicted_seconds
    assert there > 0
    across = xm.EdgeCosts(forward_seconds=there, backward_seconds=back)
    nothing = xm.EdgeCosts(backward_seconds=0.0)
    assert costs.edges == {(0, 1): across, (0, 2): across, (1, 2): nothing}
    simulated = xm.simulate(engine.schedule, costs)
    slow = engine.costs([stage] * 3, topology=xm.Topology(host_of=hosts, nic_bytes_per_s=1 << 10))
    assert xm.simulate(engine.schedule, slow).makespan_seconds > simulated.makespan_seconds
    engine.close()
    return simulated.makespan_seconds


def test_the_simulator_is_told_of_an_engine() -> None:
    spans = spawn(told_to_the_simulator, 3, {0: 0, 1: 0, 2: 1}, timeout=60)
    assert spans[0] == spans[1] == spans[2] > 6.0
