"""Plans as people write them by hand: equal stages, in each the batch sharded, matrices, or a level of ZeRO."""

import functools
import itertools
import math
from collections.abc import Iterator

from torch_xmesh.parallelism.assembly import Subject
from torch_xmesh.parallelism.cluster import HostKind
from torch_xmesh.parallelism.graph import ShardingGraph
from torch_xmesh.parallelism.layers import Layers
from torch_xmesh.parallelism.loops import LATER, PASS, WHOLE, Choice, dim_of, num_devices_used
from torch_xmesh.parallelism.operators import Forward, Operator, Value
from torch_xmesh.parallelism.sharded import Sharded
from torch_xmesh.parallelism.space import Space
from torch_xmesh.parallelism.stages import MOST_STAGES, FoundPlan, FoundStage, Shape, in_flight_of
from torch_xmesh.parallelism.stretch import Stretch
from torch_xmesh.pipeline.cut.balance import balance
from torch_xmesh.pipeline.cut.profile_memory import UnitCost

_LEVELS = (0, 2, 3)
"""The levels of ZeRO that presets have."""


def plans_by_hand(subject: Subject, schedule: str) -> Iterator[FoundPlan]:
    """Those that can be written: any number of stages, with matrices sharded over all devices of a stage on a host or
    over none, at each level of ZeRO."""
    num_devices = subject.cluster.num_devices
    per_host = min(len(host.ranks) for host in subject.cluster.hosts)
    most = min(num_devices, len(subject.layers), MOST_STAGES)
    for stages in (count for count in range(1, most + 1) if num_devices % count == 0):
        tensors = {1, math.gcd(num_devices // stages, per_host)}
        for tensor, zero in itertools.product(sorted(tensors), _LEVELS):
            try:
                yield Writer(subject, schedule, tensor, zero).written(stages)
            except ValueError:
                continue


class Writer:
    """Writes one preset."""

    def __init__(self, subject: Subject, schedule: str, tensor: int, zero: int) -> None:
        self._subject, self._schedule, self._tensor, self._zero = subject, schedule, tensor, zero
        self._batch = batch_loops(subject.layers.forward)
        self.left: list[str] = []  # heavy operators that are not done by all devices of their stage

    def written(self, num_stages: int) -> FoundPlan:
        """In so many stages. Raises ValueError where devices, layers or samples do not divide so."""
        subject = self._subject
        ranks = [rank for host in subject.cluster.hosts for rank in host.ranks]
        if num_stages > MOST_STAGES:
            raise ValueError(f"a plan has at most {MOST_STAGES} stages, got {num_stages}")
        if len(ranks) % num_stages or (len(ranks) // num_stages) % self._tensor:
            raise ValueError(f"{len(ranks)} devices in {num_stages} stages of {self._tensor} x n devices each")
        if num_stages > len(subject.layers):
            raise ValueError(f"{num_stages} stages of a model of {len(subject.layers)} layers: pass num_layers=")
        per_stage = len(ranks) // num_stages
        in_flight = in_flight_of(self._schedule, subject.layers, subject.cluster, subject.num_microbatches)
        stages = tuple(
            self._stage(first, end, tuple(ranks[i * per_stage : (i + 1) * per_stage]), in_flight[num_stages - 1 - i])
            for i, (first, end) in enumerate(even_stages(subject.layers, num_stages))
        )
        return FoundPlan(stages, all(stage.sharded.is_exact for stage in stages))

    def _stage(self, first: int, end: int, ranks: tuple[int, ...], in_flight: int) -> FoundStage:
        subject = self._subject
        shape = (len(ranks) // self._tensor, self._tensor) if self._tensor > 1 else (len(ranks),)
        kind: HostKind = subject.cluster.kind_of(ranks)
        space = Space(
            subject.cluster.links(ranks, shape),
            subject.collectives,
            compute=kind.compute,
            num_microbatches=subject.num_microbatches,
            allowed=functools.partial(self._allowed, shape[0] > 1),
            is_lenient=True,
        )
        stretch = Stretch.of(subject.layers.forward, subject.layers.operators(first, end))
        sharded = ShardingGraph(stretch, space, self._zero).least()
        self._check(sharded, shape)
        return FoundStage(first, end, Shape((), kind, (space,)), ranks, space, sharded, in_flight)

    def _check(self, sharded: Sharded, shape: tuple[int, ...]) -> None:
        """Notes heavy operators that some devices do alike, since their loops do not divide.

        Raises:
            ValueError: that are all of the stage, along the axis over which samples are shared out.
        """
        heavy = [pair for pair in zip(sharded.operators, sharded.choices, strict=True) if pair[0].loops.is_heavy]
        if shape[0] > 1 and heavy and not any(choice.axes[0] not in (WHOLE, PASS, LATER) for _, choice in heavy):
            mesh = " x ".join(map(str, shape))
            raise ValueError(
                f"{self._subject.title} on a mesh of {mesh}: no sharding of {heavy[0][0].name} is left: samples do not "
                f"divide into {shape[0]} parts"
            )
        most = math.prod(shape)
        self.left += [operator.name for operator, choice in heavy if num_devices_used(choice, shape) < most]

    def _allowed(self, has_data: bool, operator: Operator, choice: Choice) -> bool:
        """The first axis shards the batch, where it has devices and the operator samples; the second anything else."""
        batch = self._batch[operator.name]
        first = batch if has_data and batch is not None else WHOLE
        if choice.axes[0] != first and not (first == WHOLE and choice.axes[0] in (PASS, LATER)):
            return False
        return len(choice.axes) == 1 or batch is None or choice.axes[1] != batch


def batch_loops(forward: Forward) -> dict[str, str | None]:
    """By operator the loop over samples, followed through the forward: the first dim of arguments that are as long
    along it as the first argument that has dims. What an operator without a row makes has them in its first dim if that
    is as long."""
    samples: dict[Value, int] = {}
    given = (
        value
        for reader in forward.operators
        for value in reader.reads
        if value.maker is None and not value.is_parameter
    )
    first = min((value for value in given if value.shape), key=lambda value: value.name, default=None)
    batch = None if first is None else first.shape[0]
    out: dict[str, str | None] = {}

    def dim_of_samples(value: Value) -> int | None:
        is_argument = value.maker is None and not value.is_parameter
        return samples.get(value, 0 if is_argument and value.shape[:1] == (batch,) else None)

    for operator in forward.operators:
        found = None
        labelled = [labels for labels in operator.loops.inputs if labels is not None]
        for value, labels in zip(operator.reads, labelled, strict=True):
            dim = dim_of_samples(value)
            if dim is not None and dim < len(labels) and labels[dim] is not None and found is None:
                names = str(labels[dim]).split("|")
                found = next((name for name in names if name in operator.loops.extents), None)
        out[operator.name] = found
        is_of_samples = any(dim_of_samples(value) == 0 for value in operator.reads)
        for value, labels in zip(operator.makes, operator.loops.outputs, strict=True):
            dim = None if found is None else dim_of(labels, found)
            if not operator.is_known and is_of_samples and value.shape[:1] == (batch,):
                dim = 0
            if dim is not None:
                samples[value] = dim
    return out


def even_stages(layers: Layers, num_stages: int) -> list[tuple[int, int]]:
    """Layers in so many stages whose operations are about as many."""
    units = [
        UnitCost(layers.name(layer), sum(layers.forward.operators[number].loops.flops for number in numbers))
        for layer, numbers in enumerate(layers.numbers)
    ]
    starts = balance(units, num_stages, None, [1] * num_stages)
    return list(itertools.pairwise([0, *starts, len(layers)]))
