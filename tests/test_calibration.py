"""Calibration on real processes: a topology that plans can use, the same on every rank."""

from __future__ import annotations

import torch
from torch.distributed.tensor import Replicate

import torch_xmesh as xm
from torch_xmesh.calibration import calibrate
from torch_xmesh.testing import spawn


def measure(rank: int, world_size: int) -> str:
    topology = calibrate(num_bytes=1 << 20, repeats=1)
    spec = xm.Spec((1 << 20,), torch.uint8, xm.Mesh([0]), (Replicate(),))
    assert xm.plan_resharding(spec, xm.Mesh([1]), (Replicate(),), topology=topology).predicted_seconds > 0
    return topology.to_json()


def test_every_rank_measures_the_same() -> None:
    texts = spawn(measure, 3)
    assert len(set(texts)) == 1
    topology = xm.Topology.from_json(texts[0])
    assert topology.links.is_measured
    assert topology.links.local_bytes_per_s > 1 << 20
