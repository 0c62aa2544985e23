"""What one training step is measured for: the times of a rank's actions and transfers, and the bytes that a microbatch
holds."""

import dataclasses
import gc
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.cut.profile_memory import PARAMETER_COPIES, storage_of
from torch_xmesh.pipeline.engine.costs import costs_of
from torch_xmesh.pipeline.engine.setup import LOOKAHEAD
from torch_xmesh.pipeline.schedule.simulation import Costs, EdgeCosts, StageCosts

if TYPE_CHECKING:
    from torch_xmesh.pipeline.engine.place import EnginePlace

_Moved = tuple[int, int, bool, int]
Result = tuple[list[torch.Tensor], torch.Tensor | None]


class Measured(NamedTuple):
    """What one rank has measured of its stages and transfers; seconds and bytes.

    Attributes:
        stages: by stage, the median of F, I and W, and what a microbatch holds before I, what between I and W, and what
            is held anyway.
        left, came: by (edge's from stage, its to stage, is gradient, microbatch), when a transfer was sent, or was
            there, in nanoseconds of the rank's clock.
        early: stages whose W may run before their turn.
    """

    stages: dict[int, tuple[float, float, float, int, int, int]]
    left: dict[_Moved, int]
    came: dict[_Moved, int]
    early: frozenset[int]


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tensors_of_python() -> list[torch.Tensor]:
    """All tensors of this process that Python has an object of."""
    return [tensor for tensor in gc.get_objects() if type(tensor) in (torch.Tensor, nn.Parameter, DTensor)]


def _storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes by storage, of tensors with memory."""
    local = [local_of(tensor) for tensor in tensors]
    return dict(
        storage_of(tensor) for tensor in local if type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta
    )


def _tensors_of_modules(module: nn.Module) -> list[torch.Tensor]:
    """What the modules have as parameters, buffers and attributes, also in containers."""
    values = [
        (submodule._parameters, submodule._buffers, dict(vars(submodule), _modules=None))
        for submodule in module.modules()
    ]
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class MemoryMeter:
    """Counts what each stage of a rank holds for one microbatch: what it received, what autograd keeps of it, and what
    else its forward leaves behind (activation checkpointing keeps the inputs of what it will compute again in
    closures). The parameters and the user's batch are there anyway.

    Attributes:
        held: by stage, bytes.
        fixed: by stage, what is held whatever is in flight: parameters with gradients and two optimizer states, and
            buffers of values and gradients whose receives are posted ahead, and what a forward gives its modules
            (caches, parameters that stay gathered).
    """

    def __init__(self, place: "EnginePlace", batch: Iterable[torch.Tensor]) -> None:
        parameters = [parameter for named in place.named.values() for parameter in named.values()]
        self._free = {storage_of(local_of(tensor))[0] for tensor in (*parameters, *batch)}
        self._last = len(place.meshes) - 1
        self._modules = {stage: work.program.module for stage, work in place.works.items()}
        seen: set[int] = set()  # tied parameters count once
        self.fixed: dict[int, int] = {}
        for stage, named in place.named.items():
            self.fixed[stage] = 0
            for parameter in named.values():
                address, num_bytes = storage_of(local_of(parameter))
                copies = PARAMETER_COPIES if parameter.requires_grad else 1
                self.fixed[stage] += 0 if address in seen else copies * num_bytes
                seen.add(address)
        self.held: dict[int, int] = {}

    def around(self, forward: Callable[[], Result], stage: int, inputs: Sequence[torch.Tensor]) -> Result:
        """Runs a stage's forward."""
        storages: dict[int, int] = {}

        def add(tensor: torch.Tensor) -> torch.Tensor:
            address, num_bytes = storage_of(local_of(tensor))
            storages[address] = num_bytes
            return tensor

        for given in inputs:
            add(given)
        before = _tensors_of_python()  # alive till the end, so that no new storage is taken for one of theirs
        with torch.autograd.graph.saved_tensors_hooks(add, lambda tensor: tensor):
            result = forward()
        known = {*_storages(before), *storages, *_storages([*result[0], *([] if result[1] is None else [result[1]])])}
        left = {key: num_bytes for key, num_bytes in _storages(_tensors_of_python()).items() if key not in known}
        of_modules = {key: left.pop(key, 0) for key in _storages(_tensors_of_modules(self._modules[stage]))}
        self.fixed[stage] += sum(of_modules.values())
        storages.update(left)
        outputs = () if stage == self._last else result[0]
        staged = self.count(dict(storage_of(local_of(value)) for value in (*inputs, *outputs)))
        self.fixed[stage] += (LOOKAHEAD + 1) * staged  # receives that are posted ahead
        self.held[stage] = self.count(storages)
        return result

    def count(self, storages: Mapping[int, int]) -> int:
        """The bytes of storages that are not there anyway."""
        return sum(num_bytes for address, num_bytes in storages.items() if address not in self._free)


def measured(place: "EnginePlace", meter: "MemoryMeter", sizes: Sequence[int]) -> Measured:
    """What the stages of `place` took and held in the step that it has just run. `sizes`: samples of each microbatch.
    Only microbatches as large as the first one are counted. Memory was counted in the first microbatch, so its
    computation is not timed if there is another."""
    alike = {microbatch for microbatch, size in enumerate(sizes) if size == sizes[0]}
    alike -= {0} if len(alike) > 1 else set()
    seconds: dict[tuple[int, str], list[float]] = {}
    for kind, action, begin, end in place.core.spans:
        letter = next(character for character in action if character.isalpha())
        stage, microbatch = map(int, action.split(letter))
        if kind == "compute" and microbatch in alike:
            seconds.setdefault((stage, letter), []).append((end - begin) / 1e9)
    stages = {}
    storages = place.core.weight_storages
    for stage in place.stages:
        forward, first, weight = (statistics.median(seconds.get((stage, letter), [0.0])) for letter in "FIW")
        held = meter.held.get(stage, 0)
        waits = meter.count(storages.get(stage, {}))
        if not any(edge.to_stage == stage and edge.has_gradient for edge in place.boundaries.edges):
            waits = max(waits, held)  # without an input's gradient I does nothing: all of it waits
        stages[stage] = forward, first, weight, held, waits, meter.fixed[stage]
    left: dict[_Moved, int] = {}
    came: dict[_Moved, int] = {}
    for is_send, index, microbatch, is_gradient, begin, end in place.core.transfers:
        edge = place.edges[index]
        key = edge.from_stage, edge.to_stage, is_gradient, microbatch
        is_joint = edge.from_stage in place.stages and edge.to_stage in place.stages
        if sizes[microbatch] != sizes[0]:
            continue
        if is_send:
            left[key] = begin
        if not is_send or is_joint:
            came[key] = end
    return Measured(stages, left, came, frozenset(stage for stage in place.stages if place.core.may_run_early(stage)))


def transfer_seconds(told: Sequence[Measured], ahead_ns: Sequence[int]) -> dict[tuple[int, int, bool], float]:
    """The shortest way of each edge and direction: from where it is first sent until it is there on the last rank; the
    shortest, since others may have shared a NIC. `ahead_ns`: what each rank's clock is ahead."""
    begins: dict[_Moved, int] = {}
    ends: dict[_Moved, int] = {}
    for of_rank, ahead in zip(told, ahead_ns, strict=True):
        for key, at in of_rank.left.items():
            begins[key] = min(begins.get(key, at - ahead), at - ahead)
        for key, at in of_rank.came.items():
            ends[key] = max(ends.get(key, at - ahead), at - ahead)
    found: dict[tuple[int, int, bool], float] = {}
    for key in begins.keys() & ends.keys():
        seconds = max(0, ends[key] - begins[key]) / 1e9
        found[key[:3]] = min(found.get(key[:3], seconds), seconds)
    return found


def costs_from(place: "EnginePlace", told: Sequence[Measured], ahead_ns: Sequence[int], samples: int) -> Costs:
    """Costs of the whole pipeline for microbatches of so many samples, as they were measured: of several ranks of a
    stage the slowest. Transfers take what they took, or, on links that the user has described, what their plans
    predict."""
    stages = []
    for stage in range(len(place.meshes)):
        rows = [of_rank.stages[stage] for of_rank in told if stage in of_rank.stages]
        forward, first, weight, held, waiting, fixed = map(max, zip(*rows, strict=True))
        stages.append(
            StageCosts(
                forward_seconds=forward,
                backward_input_seconds=first,
                backward_weight_seconds=weight,
                activation_bytes=held,
                weight_bytes=waiting,
                fixed_bytes=fixed,
            )
        )
    costs = costs_of(
        place.transfers, place.boundaries, stages=stages, topology=None, overlap=place.overlap, samples=samples
    )
    early = [
        stage
        for stage in range(len(stages))
        if place.overlap
        and place.early_weights
        and all(stage in of_rank.early for of_rank in told if stage in of_rank.stages)
    ]
    costs = dataclasses.replace(costs, early_weights=early)
    if place.boundaries.plan_options.topology is not None:
        return costs
    edges: dict[tuple[int, int], EdgeCosts | float] = {}
    taken = transfer_seconds(told, ahead_ns)
    for edge in place.boundaries.edges:
        ends = edge.from_stage, edge.to_stage
        ways = [taken.get((*ends, back), 0.0) for back in (False, True)]
        edges[ends] = EdgeCosts(forward_seconds=ways[0], backward_seconds=ways[1], has_gradient=edge.has_gradient)
    return dataclasses.replace(costs, edges=edges)
