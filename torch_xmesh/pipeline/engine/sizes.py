"""A pipeline whose inputs have other sizes than the example's besides the number of samples: a sequence's length."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from torch_xmesh import _C
from torch_xmesh.pipeline.cut.partition import Partition
from torch_xmesh.pipeline.cut.values import Shapes, describe_path
from torch_xmesh.pipeline.engine.boundary import Boundaries, segment_moves
from torch_xmesh.pipeline.engine.place import EnginePlace
from torch_xmesh.pipeline.engine.sample_order import SampleOrder
from torch_xmesh.pipeline.engine.stage import StageWork


@dataclasses.dataclass
class SizedPlace:
    """A place in steps whose inputs have the same sizes, the number of samples apart.

    Attributes:
        partition, boundaries, works: as EnginePlace has them for the example's sizes.
        orders: by samples and shards of a batch that all ranks can step, the sample order for each number of
            microbatches.
    """

    place: EnginePlace
    partition: Partition
    boundaries: Boundaries
    works: Mapping[int, StageWork]
    orders: dict[tuple[int, int], dict[int, SampleOrder]] = dataclasses.field(default_factory=dict)
    _plans: dict[tuple[int, ...], list["_C.EdgePlans"]] = dataclasses.field(default_factory=dict)

    @staticmethod
    def at(place: EnginePlace, shapes: Shapes, usual: Mapping[str, torch.Tensor]) -> "SizedPlace":
        """Called by all ranks alike, each with what it has of the batch. Raises ValueError where the stages do not work
        for inputs of these shapes."""
        partition = place.partition.resized(shapes, usual)
        if partition is place.partition:
            return SizedPlace(place, partition, place.boundaries, place.works)
        boundaries = place.boundaries.at(partition.values)
        works = {stage: work.at(partition, boundaries) for stage, work in place.works.items()}
        return SizedPlace(place, partition, boundaries, works)

    def orders_of(self, samples: int, shards: int) -> dict[int, SampleOrder]:
        """By the number of microbatches, of those into which the batch can be cut. Raises ValueError if that is
        none."""
        found, refusal = {}, None
        for number in self.place.numbers((samples, shards)):
            try:
                found[number] = self._order_of(samples, shards, number)
            except ValueError as error:
                refusal = refusal or error
        if not found:
            raise refusal or ValueError(f"a batch of {samples} samples leaves some of its {shards} shards without any")
        return found

    def _order_of(self, samples: int, shards: int, number: int) -> SampleOrder:
        order = SampleOrder.of(samples, number, shards)
        for size in dict.fromkeys(order.sizes):
            self._check_samples(size)
        self.place.sharded.check_samples(order.sizes)
        return order

    def _check_samples(self, size: int) -> None:
        """Raises ValueError where a microbatch of `size` samples cannot be moved between the stages, or out of them."""
        self.boundaries.check_samples(size)
        for edge in self.boundaries.edges:
            for info in edge.values:
                self.boundaries.sent_shape(info, size)
        for name in self.partition.outputs.names:
            self.place.meshes[-1].global_shape(self.partition.values[name], size)

    def plans(self, sizes: Sequence[int]) -> list["_C.EdgePlans"]:
        """The transfer plans of this rank's edges, for microbatches of these sizes."""
        key = tuple(sizes)
        if key not in self._plans:
            self._plans[key] = self._make_plans(sizes)
        return self._plans[key]

    def _make_plans(self, sizes: Sequence[int]) -> list["_C.EdgePlans"]:
        place, plans = self.place, []
        for edge in self.boundaries.edges:
            if edge.from_stage not in place.stages and edge.to_stage not in place.stages:
                continue
            start, end = place.meshes[edge.from_stage], place.meshes[edge.to_stage]
            lane = f"{edge.from_stage}-{edge.to_stage}"
            dtypes = [info.dtype for info in edge.values]
            if self.boundaries.is_local(edge):
                plans.append(_C.EdgePlans(lane, edge.text, False, dtypes, [], []))
                continue
            ways: list[list[_C.PreparedPlan]] = []
            for is_gradient in (False, True):
                made: dict[int, _C.PreparedPlan] = {}
                for n in dict.fromkeys(sizes if edge.has_gradient or not is_gradient else ()):
                    moves = self.boundaries.moves(edge, n, is_gradient)
                    made[n] = place.transfers.prepare(moves, self.boundaries.plan_options)
                ways.append([made[n] for n in sizes if n in made])
            is_joint = place.transfers.rank in start.ranks and place.transfers.rank in end.ranks
            plans.append(_C.EdgePlans(lane, edge.text, is_joint, dtypes, ways[0], ways[1]))
        for stage in place.stages:
            plans += self._plans_within(stage, len(sizes))
        return plans

    def _plans_within(self, stage: int, number: int) -> list["_C.EdgePlans"]:
        """Those between a stage's segments, for so many microbatches."""
        plans, place, segments = [], self.place, self.partition.stages[stage].segments
        for edge in () if segments is None else segments.edges:
            lane = f"{stage}: {edge.from_segment}-{edge.to_segment}"
            ways: list[list[_C.PreparedPlan]] = [[], []]
            for is_gradient in (False, True) if edge.is_sent else ():
                moves = segment_moves(edge, place.meshes[stage], is_gradient=is_gradient)
                if moves:
                    ways[is_gradient] = [place.transfers.prepare(moves, self.boundaries.plan_options)] * number
            dtypes = [value.dtype for value in edge.values]
            plans.append(_C.EdgePlans(lane, edge.text, edge.is_sent, dtypes, ways[0], ways[1]))
        return plans


class InputSizes:
    """The sizes of a model's inputs as numbers that ranks can tell each other.

    Attributes:
        texts: by number, what a person is told of it.
    """

    def __init__(self, partition: Partition) -> None:
        self._inputs = partition.inputs
        self._dims = {
            f"size {name} {dim}": (name, dim)
            for name, info in partition.inputs.items()
            if info.stages
            for dim in range(len(info.shape))
        }
        self.texts = {
            key: f"argument {describe_path(self._inputs[name].path)} has {{}} entries along dim {dim}"
            for key, (name, dim) in self._dims.items()
        }

    def told(self, shapes: Shapes) -> dict[str, int]:
        """The sizes of the inputs that this rank reads, for the other ranks; batch dims are as in the example."""
        return {key: shapes[name][dim] for key, (name, dim) in self._dims.items() if name in shapes}

    def shapes(self, told: Mapping[str, int | None]) -> dict[str, tuple[int, ...]]:
        """The shapes of all inputs, from the sizes that ranks have told."""
        found = {name: list(info.shape) for name, info in self._inputs.items()}
        for key, (name, dim) in self._dims.items():
            size = told[key]
            if size is not None:
                found[name][dim] = size
        return {name: tuple(shape) for name, shape in found.items()}
