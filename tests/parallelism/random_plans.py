"""Models made at random, and plans for them: cut anywhere, each stage sharded anyhow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from small_models import Layer
from torch import nn
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.parallelism.assembly import Subject, assembled
from torch_xmesh.parallelism.cluster import Cluster, cluster_of
from torch_xmesh.parallelism.forward_modes import runnable
from torch_xmesh.parallelism.graph import ShardingGraph
from torch_xmesh.parallelism.judge import Judge
from torch_xmesh.parallelism.layers import Layers, layers_of
from torch_xmesh.parallelism.recorded_forwards import samples_of
from torch_xmesh.parallelism.sharded import Sharded
from torch_xmesh.parallelism.space import Space
from torch_xmesh.parallelism.stages import FoundPlan, FoundStage, Shape
from torch_xmesh.parallelism.stretch import Stretch

MESHES = {
    4: (((4,),), ((2, 2),), ((2,), (2,)), ((1,), (1,), (2,)), ((2,), (1,), (1,)), ((1,), (2,), (1,)), ((1,),) * 4),
}
"""By number of devices, stages' meshes."""


class RandomModel(nn.Module):
    """Operators on [8, 16, 32], each on any of what was made before; with two arguments, both read anywhere."""

    def __init__(self, random: Random, num_operators: int = 8) -> None:
        super().__init__()
        self.table = nn.Embedding(24, 32)
        self.parts = nn.ModuleList()
        self.program: list[tuple[str, list[int]]] = []
        kinds = list(_KINDS)
        for number in range(num_operators):
            kind = random.choice(kinds)
            made = _KINDS[kind][0]
            self.parts.append(made() if made is not None else nn.Identity())
            latest = max(0, number - 3)
            self.program.append((kind, [random.randrange(latest, number + 1), random.randrange(number + 1)]))
        self.early = random.randrange(num_operators)
        self.head = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor, *, indices: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        made = [x]
        for (kind, sources), part in zip(self.program, self.parts, strict=True):
            values = [made[source] for source in sources]
            made.append(_KINDS[kind][1](part, *values, self.table, indices))
        out: torch.Tensor = self.head(made[-1])
        return out, {"early": made[self.early] * 0.5, "mean": made[-1].square().mean()}


def _in_place(part: nn.Module, x: torch.Tensor, y: torch.Tensor, *rest: Any) -> torch.Tensor:
    out: torch.Tensor = part(x)
    return out.mul_(0.5).add_(y)


_KINDS: dict[str, tuple[Callable[[], nn.Module] | None, Callable[..., torch.Tensor]]] = {
    "linear": (lambda: nn.Linear(32, 32), lambda part, x, y, *rest: part(x)),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)),
        lambda part, x, y, *rest: part(x) + y,
    ),
    "norm": (lambda: nn.LayerNorm(32), lambda part, x, y, *rest: part(x)),
    "layer": (lambda: Layer(32, 4, is_pre=True), lambda part, x, y, *rest: part(x)),
    "gate": (lambda: nn.Linear(32, 32), lambda part, x, y, *rest: part(x).sigmoid() * y),
    "mix": (lambda: nn.Linear(16, 16), lambda part, x, y, *rest: part(x.transpose(1, 2)).transpose(1, 2) + y),
    "pool": (None, lambda part, x, y, *rest: x - y.mean(1, keepdim=True)),
    "halves": (None, lambda part, x, y, *rest: torch.cat([x.chunk(2, -1)[0], y.chunk(2, -1)[1]], -1)),
    "lookup": (None, lambda part, x, y, table, indices: x + table(indices)),
    "weights": (None, lambda part, x, y, *rest: (x @ y.transpose(1, 2) / 6).softmax(-1) @ y),
    "in place": (lambda: nn.Linear(32, 32), _in_place),
    "channels": (
        lambda: nn.Conv1d(16, 16, 3, padding=1),
        lambda part, x, y, *rest: part(x) + y,
    ),
}


def random_input(generator: torch.Generator, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(batch, 16, 32, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 24, (batch, 16), generator=generator)


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    out, more = output
    loss: torch.Tensor = F.mse_loss(out, target) + more["early"].square().mean() + more["mean"]
    return loss


def any_sharding(graph: ShardingGraph, random: Random) -> Sharded:
    """A random sharding: about half of the operators get a random choice, the others the cheapest that goes with it."""
    allowed = graph.everything()
    for place, operator in enumerate(graph.stretch.operators):
        if random.random() < 0.5 and not operator.is_constant:
            choice = random.randrange(len(graph.space.choices(operator)))
            allowed = graph.narrowed(allowed, place, choice, is_taken=True)
    return graph.least(allowed=allowed)


def random_plan(
    model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], random: Random, *, num_devices: int = 4
) -> xm.ParallelPlan:
    """Stages that begin anywhere, in any order of devices, each sharded anyhow."""
    meshes = random.choice(MESHES[num_devices])
    modes = runnable(model, args, kwargs, checks_next=False)
    forward = dataclasses.replace(modes.recorded.forward, num_samples=samples_of(args, kwargs))
    layers = layers_of(forward, 6)
    topology = xm.Topology(devices_per_host=2, nic_bytes_per_s=10**8, local_bytes_per_s=10**10)
    devices = xm.Mesh(torch.arange(num_devices).view(-1, 2))
    cluster = cluster_of(devices, topology, xm.Compute(1e11, 1e10), None)
    stages = _stages(layers, cluster, meshes, random)
    name = random.choice(["1f1b", "gpipe", "zb_h1", "eager_1f1b"])
    judge = Judge(cluster, 2, name)
    judged = judge.judged(FoundPlan(tuple(stages), is_proven=False))
    assert judged is not None
    return assembled(Subject(type(model).__name__, modes, layers, cluster, 2, "ring", name), judged, judge)


def _stages(layers: Layers, cluster: Cluster, meshes: Sequence[tuple[int, ...]], random: Random) -> list[FoundStage]:
    begins = [0, *sorted(random.sample(range(1, len(layers)), len(meshes) - 1)), len(layers)]
    free = list(range(cluster.num_devices))
    random.shuffle(free)
    out = []
    for number, mesh in enumerate(meshes):
        count = torch.Size(mesh).numel()
        grid = torch.tensor(sorted(free[:count])).view(mesh)
        for axis, size in enumerate(mesh):
            grid = grid.index_select(axis, torch.tensor(random.sample(range(size), size)))
        ranks, free = tuple(grid.flatten().tolist()), free[count:]
        kind = cluster.hosts[0].kind
        links = [(size, 1e-5 / (axis + 1), 1e-9 / (axis + 1)) for axis, size in enumerate(mesh)]
        space = Space(links, "ring", compute=kind.compute, num_microbatches=2)
        stretch = Stretch.of(layers.forward, layers.operators(begins[number], begins[number + 1]))
        sharded = any_sharding(ShardingGraph(stretch, space, zero=random.randrange(4)), random)
        shape = Shape((), kind, (space,))
        out.append(FoundStage(begins[number], begins[number + 1], shape, ranks, space, sharded, 1))
    return out


@dataclasses.dataclass(frozen=True)
class Case:
    """A model made at random, with an example and a plan for it."""

    model: nn.Module
    x: torch.Tensor
    indices: torch.Tensor
    plan: xm.ParallelPlan


def random_case(seed: int, num_devices: int = 4) -> Case:
    random = Random(seed)
    torch.manual_seed(seed)
    model = RandomModel(random).double()
    x, indices = random_input(torch.Generator().manual_seed(seed), 8)
    return Case(model, x, indices, random_plan(model, (x,), {"indices": indices}, random, num_devices=num_devices))
