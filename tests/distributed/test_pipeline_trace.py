"""What happened in a step, as trace, picture and table; and what the simulator is told of an engine."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from pipeline_cases import Run, case_of, make_engine
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import torch_xmesh as xm
from torch_xmesh.testing import spawn


def trace(rank: int, world_size: int, folder: str) -> str:
    run = Run("mlp", ("layers.2",), ([0, 1], [2]))
    torch.manual_seed(0)
    case = case_of(run.model)
    engine = make_engine(run, case.build())
    args, kwargs, target = case.batch(run.samples)
    engine.step(*args, target=target, **kwargs)
    engine.trace(f"{folder}/trace.json")
    engine.timeline(f"{folder}/timeline.png")
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
    done = [(event["pid"], event["name"]) for event in events if event["ph"] == "X" and "wait" not in event["name"]]
    expected = {(rank, f"{rank // 2}{kind}{mb}") for rank in range(3) for kind in "FB" for mb in range(4)}
    expected |= {(rank, name) for rank in range(3) for name in ("losses", "buffers")}
    expected |= {(rank, "gradients") for rank in range(2)}
    assert set(done) == expected
    assert len(done) == len(expected)
    assert sum(event["ph"] == "b" for event in events) == 24
    assert (tmp_path / "timeline.png").stat().st_size > 1000


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
