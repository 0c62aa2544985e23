"""Least costs of real models' graphs against an integer program, as Alpa states it (eq. 1), solved by HiGHS."""

from __future__ import annotations

from typing import Any

import highspy
import numpy as np
import pytest
import torch
from small_models import Gpt, Mlp
from torch import nn

from torch_xmesh.parallelism.compute import Compute
from torch_xmesh.parallelism.graph import FREE, Prices, ShardingGraph
from torch_xmesh.parallelism.recorded_forwards import forward_of
from torch_xmesh.parallelism.space import Links, Space
from torch_xmesh.parallelism.stretch import Stretch

AXES: dict[str, list[Links]] = {"4": [(4, 1e-6, 1e-9)], "2x2": [(2, 1e-5, 1e-9), (2, 1e-6, 1e-10)]}


def model_and_input(name: str) -> tuple[nn.Module, torch.Tensor]:
    if name == "mlp":
        return Mlp(64, 4), torch.zeros(32, 64)
    if name == "conv":
        convolutions = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
        return nn.Sequential(convolutions, nn.Flatten(), nn.Linear(8 * 36, 16)), torch.zeros(8, 4, 8, 8)
    model = Gpt(num_layers=1)
    if name == "tied gpt":
        model.head.weight = model.tokens.weight
    return model, torch.zeros(8, 16, dtype=torch.int64)


def least_by_highs(graph: ShardingGraph, costs: np.ndarray) -> float:
    """One binary variable per choice of a node, one continuous one per pair of choices of an edge."""
    program: Any = highspy.Highs()  # type: ignore[no-untyped-call]
    program.setOptionValue("output_flag", False)
    program.setOptionValue("mip_rel_gap", 0.0)
    program.setOptionValue("mip_abs_gap", 0.0)
    scale = 1 / max(float(costs[np.isfinite(costs)].max()), 1e-12)

    def variable(cost: float, *, is_whole: bool) -> int:
        number: int = program.getNumCol()
        program.addCol(cost * scale if np.isfinite(cost) else 0.0, 0.0, 1.0 if np.isfinite(cost) else 0.0, 0, [], [])
        if is_whole:
            program.changeColIntegrality(number, highspy.HighsVarType.kInteger)
        return number

    def add_up(variables: list[int], to: int | None = None) -> None:
        """Their sum is the other variable, or 1."""
        values = [1.0] * len(variables)
        bound = 1.0 if to is None else 0.0
        more = [] if to is None else [to]
        program.addRow(bound, bound, len(variables) + len(more), [*variables, *more], [*values, *(-1.0 for _ in more)])

    nodes = []
    for begin, size in zip(graph._begins, graph._sizes, strict=True):
        nodes.append([variable(float(cost), is_whole=True) for cost in costs[begin : begin + size]])
        add_up(nodes[-1])
    for edge in graph._edges:
        table = graph.space.table(edge.value, edge.made, edge.taken, edge.has_gradient)
        rows, columns = len(edge.made), len(edge.taken)
        pairs = np.array([[variable(table.at(i, j), is_whole=False) for j in range(columns)] for i in range(rows)])
        for i in range(rows):
            add_up(pairs[i].tolist(), nodes[edge.node][i])
        for j in range(columns):
            add_up(pairs[:, j].tolist(), nodes[edge.reader][j])
    program.run()
    assert program.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return float(program.getInfo().objective_function_value) / scale


@pytest.mark.parametrize("axes", ["4", "2x2"])
@pytest.mark.parametrize("name", ["mlp", "conv", "gpt", "tied gpt"])
def test_elimination_finds_what_highs_finds(name: str, axes: str) -> None:
    model, x = model_and_input(name)
    space = Space(AXES[axes], "ring", compute=Compute(1e12, 1e11), num_microbatches=4)
    graph = ShardingGraph(Stretch.of(forward_of(model, (x,))), space)
    dear = graph.least().cost / graph.least().bytes.total(2)
    for prices in (FREE, Prices(dear, 2 * dear)):
        found = graph.least(prices)
        costs = graph._zero_costs + prices.fixed * graph._zero_fixed + prices.per_microbatch * graph._all_per_microbatch
        charged = prices.fixed * float(graph.charged(found.chosen, 2).sum()) if prices != FREE else 0.0
        assert found.cost + charged == pytest.approx(least_by_highs(graph, costs), rel=1e-6)
