"""The cheapest sharding that fits a memory limit, against all shardings of small models."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from small_models import Gpt, Mlp
from torch import nn

from torch_xmesh.parallelism.compute import Compute
from torch_xmesh.parallelism.graph import Prices, ShardingGraph
from torch_xmesh.parallelism.limit import within_limit
from torch_xmesh.parallelism.recorded_forwards import forward_of
from torch_xmesh.parallelism.sharded import Sharded
from torch_xmesh.parallelism.space import Space
from torch_xmesh.parallelism.stretch import Stretch
from torch_xmesh.parallelism.zero import LEVELS, with_zero

SPACE = Space([(4, 1e-6, 1e-9)], "ring", compute=Compute(1e12, 1e11), num_microbatches=4)
IN_FLIGHT = 3


class Frozen(nn.Module):
    """One weight that two layers read, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)
        self.other.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.one(torch.relu(self.other(self.one(x))))
        return out


def graphs_of(model: nn.Module, x: torch.Tensor) -> list[ShardingGraph]:
    stretch = Stretch.of(forward_of(model, (x,)))
    return [ShardingGraph(stretch, SPACE, level) for level in LEVELS]


def all_of(graph: ShardingGraph) -> list[Sharded]:
    """Every choice of every node."""
    out = []
    for chosen in itertools.product(*(range(size) for size in graph._sizes)):
        cost = float(graph.operator_costs(chosen).sum())
        if np.isfinite(cost):
            out.append(with_zero(Sharded(graph, chosen, graph._held(chosen), cost), graph.zero))
    return out


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Mlp(64, 2), torch.zeros(128, 64)),
        (nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 30)), torch.zeros(16, 64)),
        (Frozen(), torch.zeros(64, 64)),
    ],
    ids=["mlp", "wide", "frozen"],
)
def test_the_cheapest_that_fits(model: nn.Module, x: torch.Tensor) -> None:
    graphs = graphs_of(model, x)
    everything = [one for graph in graphs for one in all_of(graph)]
    sizes = sorted({one.bytes.total(IN_FLIGHT) for one in everything})
    assert len(sizes) > 5
    for limit in [*sizes[:: max(1, len(sizes) // 12)], sizes[-1]]:
        fitting = [one for one in everything if one.bytes.total(IN_FLIGHT) <= limit]
        least = min(one.cost for one in fitting)
        for most_branches in (0, 1000):
            found = within_limit(graphs, IN_FLIGHT, int(limit), most_branches)
            if most_branches:
                assert found is not None
                assert found.sharded.cost <= least * 1.0011
                assert found.gap <= 0.0011
            if found is not None:
                assert found.sharded.bytes.total(IN_FLIGHT) <= limit
                assert found.bound <= least * (1 + 1e-9)
                assert found.sharded.cost >= least * (1 - 1e-9)
                assert found.gap == pytest.approx(1 - found.bound / found.sharded.cost, abs=1e-9)


def test_nothing_fits_in_too_little() -> None:
    graphs = graphs_of(Mlp(64, 2), torch.zeros(128, 64))
    assert within_limit(graphs, IN_FLIGHT, 100, 1000) is None
    roomy = within_limit(graphs, IN_FLIGHT, 2**40)
    assert roomy is not None
    assert roomy.gap == 0
    assert roomy.sharded.cost == pytest.approx(graphs[0].least().cost)


def test_branches_prove_more() -> None:
    """A search with branches proves a smaller gap, for a model with too many shardings to list."""
    graphs = graphs_of(Gpt(num_layers=2), torch.zeros(8, 16, dtype=torch.int64))
    least = graphs[2].least(Prices(1.0, IN_FLIGHT)).bytes.total(IN_FLIGHT)
    most = graphs[0].least().bytes.total(IN_FLIGHT)
    gaps = []
    for limit in np.linspace(least * 1.05, most, 6):
        few, many = (within_limit(graphs, IN_FLIGHT, int(limit), count) for count in (0, 60))
        assert few is not None
        assert many is not None
        assert many.sharded.cost <= few.sharded.cost
        assert many.bound >= few.bound * (1 - 1e-12)
        gaps.append((few.gap, many.gap))
    assert all(many <= few + 1e-12 for few, many in gaps)
    assert max(many for _, many in gaps) < 0.05
    assert gaps[-1] == (0, 0)
