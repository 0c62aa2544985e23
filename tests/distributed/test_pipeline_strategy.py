"""`strategy=` and `topology=` of an engine: how its boundaries are resharded; the numbers stay the oracle's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pipeline_cases import compare
from torch import nn
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import serial_step, spawn

LINKS = xm.Topology(devices_per_host=1, nic_bytes_per_s=1_000_000, latency_us=5)
COSTS = [xm.StageCosts(forward_seconds=0.1, backward_seconds=0.2)] * 2


def make(model: nn.Module, meshes: Any, **options: Any) -> xm.PipelineEngine:
    return xm.PipelineEngine(
        model,
        (torch.empty(2, 64),),
        meshes=[xm.Mesh(mesh) for mesh in meshes],
        split=xm.split_at("2"),
        num_microbatches=2,
        loss_fn=F.mse_loss,
        **options,
    )


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))


def predicted(engine: xm.PipelineEngine, topology: xm.Topology | None = None) -> float:
    edge = dict(engine.costs(COSTS, topology=topology).edges or {})[0, 1]
    assert isinstance(edge, xm.EdgeCosts)
    return edge.forward_seconds


def steps(rank: int, world_size: int) -> None:
    meshes = ([[0], [1]], [[2, 3]])
    model = layers()
    predictions: dict[Any, float] = {}
    for strategy in ("auto", "send_recv", xm.Broadcast(order="greedy"), "striped", "global_allgather"):
        reference = copy.deepcopy(model)
        engine = make(copy.deepcopy(model), meshes, strategy=strategy, topology=LINKS)
        predictions[strategy] = predicted(engine)
        for step in range(2):
            torch.manual_seed(step)
            x, y = torch.randn(7, 64), torch.randn(7, 3)
            losses: list[torch.Tensor] = []
            output = engine.step(x, target=y, losses=losses)
            options: dict[str, Any] = {"loss_fn": F.mse_loss, "num_microbatches": 2, "num_data_shards": 2}
            expected = serial_step(reference, (x,), target=y, **options)
            compare(engine, reference, expected, output, losses, f"{strategy}, step {step}")
        engine.close()
    assert predictions["auto"] == min(predictions.values())
    assert len(set(predictions.values())) > 1
    engine = make(layers(), meshes, strategy="send_recv")
    assert predicted(engine) != predicted(engine, LINKS) == predictions["send_recv"]
    engine.close()


def refusals(rank: int, world_size: int) -> list[str]:
    texts = []
    odd: list[dict[str, Any]] = [
        {"strategy": "send_recv" if rank == 1 else "auto"},
        {"topology": LINKS if rank == 1 else None},
        {"strategy": "pigeon"},
        {"topology": xm.Topology({0: 0})},
        {"topology": {"host_of": {}}},
    ]
    for options in odd:
        with pytest.raises(ValueError) as caught:
            make(layers(), ([0], [1]), **options)
        texts.append(str(caught.value))
    return texts


def test_boundaries_move_as_the_strategy_says() -> None:
    spawn(steps, 4, timeout=120)


def test_ranks_agree_on_strategy_and_topology() -> None:
    for texts in spawn(refusals, 2, timeout=120):
        assert "strategy" in texts[0]
        assert "send_recv" in texts[0]
        assert "topology" in texts[1]
        assert "pigeon" in texts[2]
        assert "names no host for rank 1" in texts[3]
        assert "topology must be an xm.Topology, got dict" in texts[4]
