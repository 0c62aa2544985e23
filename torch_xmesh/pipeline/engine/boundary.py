"""What moves between the stages of a pipeline: the edges, where values lie on each stage, and every edge's plans."""

import dataclasses
from collections.abc import Mapping, Sequence

from torch.distributed.tensor import Placement, Replicate

from torch_xmesh import _C
from torch_xmesh.pipeline.cut.microbatch import shard_sizes
from torch_xmesh.pipeline.cut.stage_program import StageProgram
from torch_xmesh.pipeline.cut.stage_segments import SegmentEdge
from torch_xmesh.pipeline.cut.value_info import ValueInfo
from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh
from torch_xmesh.plan_cache import Move, PlanOptions
from torch_xmesh.spec import normal_placements

Placed = tuple[Sequence[Placement], bool]
"""Placements of a value at a boundary, and whether the stage sees a DTensor."""


@dataclasses.dataclass(frozen=True)
class Edge:
    """Everything that goes from one stage to a later one; one plan each way."""

    from_stage: int
    to_stage: int
    values: tuple[ValueInfo, ...]

    @property
    def has_gradient(self) -> bool:
        return any(value.is_differentiable for value in self.values)

    @property
    def text(self) -> str:
        return ", ".join(value.name for value in self.values)


def edges_of(values: Mapping[str, ValueInfo]) -> list[Edge]:
    """One edge per pair of stages between which a value goes, in the order of the stages."""
    pairs: dict[tuple[int, int], list[ValueInfo]] = {}
    for value in values.values():
        if value.producer is not None:
            for consumer in value.consumers:
                pairs.setdefault((value.producer, consumer), []).append(value)
    return [Edge(start, end, tuple(pairs[start, end])) for start, end in sorted(pairs)]


class Boundaries:
    """Where values lie on each stage, and the plans of every edge that this rank takes part in.

    Args:
        given: by value, where it lies on all stages.
        by_stage: by value and stage, where it lies there; before all else.
    """

    def __init__(
        self,
        edges: Sequence[Edge],
        meshes: Sequence[StageMesh],
        given: Mapping[str, Placed],
        plan_options: PlanOptions,
        by_stage: Mapping[tuple[str, int], tuple[Placement, ...]] | None = None,
    ) -> None:
        self.plan_options = plan_options
        self.edges = list(edges)
        self.meshes = list(meshes)
        self._given = dict(given)
        self._by_stage = dict(by_stage or {})
        for edge in self.edges:
            for info in edge.values:
                self._check_stack(edge, info)

    def at(self, values: Mapping[str, ValueInfo]) -> "Boundaries":
        """The same for values of other sizes."""
        edges = [
            dataclasses.replace(edge, values=tuple(values[info.name] for info in edge.values)) for edge in self.edges
        ]
        return Boundaries(edges, self.meshes, self._given, self.plan_options, self._by_stage)

    def _check_stack(self, edge: Edge, info: ValueInfo) -> None:
        """One value for all data shards may be read by many; what each shard has of its own needs as many readers."""
        counts = [self.meshes[stage].num_shards for stage in (edge.from_stage, edge.to_stage)]
        has_own = counts[0] > 1 or any(size.per_sample for size in info.tensor.sizes)
        if info.varies and info.name not in self._given and has_own and counts[0] != counts[1]:
            raise ValueError(
                f"value {info.name} (shape {list(info.shape)}) has no batch dim and depends on the samples, so each "
                f"data shard has its own: {counts[0]} of stage {edge.from_stage} cannot become {counts[1]} of stage "
                f"{edge.to_stage}; give both stages as many data shards, or, if it is the same on all, name it in "
                "boundary_placements"
            )

    def is_stacked(self, info: ValueInfo) -> bool:
        """Whether the value crosses as one row of a stack, a row for each data shard of its producer."""
        return (
            info.name not in self._given and info.producer is not None and self.meshes[info.producer].is_stacked(info)
        )

    def placements(self, info: ValueInfo, stage: int) -> tuple[Placement, ...]:
        """The placements of a value on a stage's mesh.

        Raises:
            ValueError: boundary_placements that do not fit the mesh.
        """
        mesh = self.meshes[stage]
        if (info.name, stage) in self._by_stage:
            return self._by_stage[info.name, stage]
        if info.name not in self._given:
            if info.varies and not self.is_stacked(info):
                return (Replicate(),) * len(mesh.grid.shape)
            return mesh.placements(info)
        placements = normal_placements(self._given[info.name][0], len(info.shape))
        if len(placements) != len(mesh.grid.shape):
            raise ValueError(
                f"boundary_placements of value {info.name}: expected {len(mesh.grid.shape)} placements for stage "
                f"{stage}'s mesh, got {len(placements)}"
            )
        return placements

    def is_dtensor(self, info: ValueInfo) -> bool:
        """Whether stages see the value as a DTensor."""
        return info.name in self._given and bool(self._given[info.name][1])

    def is_local(self, edge: Edge) -> bool:
        """Nothing needs to move: both stages have the same mesh, the same placements and the same device."""
        start, other = self.meshes[edge.from_stage], self.meshes[edge.to_stage]
        return (start.grid, start.data_axis, start.device.type) == (other.grid, other.data_axis, other.device.type)

    def sent_shape(self, info: ValueInfo, num_samples: int) -> tuple[int, ...]:
        """The shape of a value in a microbatch of `num_samples` samples; where data shards' values are stacked, that of
        the stack."""
        if info.producer is not None and self.is_stacked(info):
            return self.meshes[info.producer].global_shape(info, num_samples)
        return info.shape_for(num_samples)

    def moves(self, edge: Edge, num_samples: int, is_gradient: bool) -> list[Move]:
        """What a microbatch of `num_samples` samples moves over an edge."""
        moves = []
        src, dst = self.meshes[edge.from_stage], self.meshes[edge.to_stage]
        for info in edge.values:
            if is_gradient and not info.is_differentiable:
                continue
            shape = self.sent_shape(info, num_samples)
            start, end = self.placements(info, edge.from_stage), self.placements(info, edge.to_stage)
            if is_gradient:
                back = dst.gradient_placements(info, end)
                moves.append(Move.of(shape, info.dtype, (dst.values_grid, back), (src.values_grid, start)))
            else:
                moves.append(Move.of(shape, info.dtype, (src.values_grid, start), (dst.values_grid, end)))
        return moves

    def check_samples(self, num_samples: int) -> None:
        """Raises ValueError where a value cannot be sharded as its samples are."""
        for edge in self.edges:
            for info in edge.values:
                for stage in (edge.from_stage, edge.to_stage):
                    if self.meshes[stage].num_shards > 1:
                        self._check_shards(info, stage, num_samples)

    def _check_shards(self, info: ValueInfo, stage: int, num_samples: int) -> None:
        mesh = self.meshes[stage]
        samples = shard_sizes(num_samples, mesh.num_shards)
        if info.batch_dim is None:
            if min(samples) == 0:
                raise ValueError(
                    f"value {info.name} has no batch dim, and a microbatch of {num_samples} samples leaves a data "
                    f"shard of stage {stage} without any: pass at least {mesh.num_shards} samples per microbatch"
                )
            return
        rows = info.shape_for(num_samples)[info.batch_dim]
        expected, parts = shard_sizes(rows, mesh.num_shards), [info.shape_for(n)[info.batch_dim] for n in samples]
        if info.name not in self._given and parts != expected:
            raise ValueError(
                f"value {info.name} has {rows} rows for {num_samples} samples, which {mesh.num_shards} data shards of "
                f"stage {stage} would hold as {parts}, not as DTensor's {expected}: pass a multiple of "
                f"{mesh.num_shards} samples"
            )

    def edge_values(self, edge: Edge, outputs: Sequence[str], inputs: Sequence[str]) -> "_C.EdgeValues":
        """The edge in C++ form; `outputs` of its first stage, `inputs` of its second."""
        src, dst = self.meshes[edge.from_stage], self.meshes[edge.to_stage]
        edge_values = _C.EdgeValues()
        edge_values.from_stage, edge_values.to_stage = edge.from_stage, edge.to_stage
        edge_values.from_positions = [outputs.index(info.name) for info in edge.values]
        edge_values.to_positions = [inputs.index(info.name) for info in edge.values]
        edge_values.is_differentiable = [int(info.is_differentiable) for info in edge.values]
        edge_values.has_producer = src.rank in src.ranks
        edge_values.has_consumer = dst.rank in dst.ranks
        edge_values.is_local = self.is_local(edge) and edge_values.has_producer
        is_first = not edge_values.has_producer or edge_values.is_local or src.shard == 0
        replicated = [
            src.data_axis is not None and isinstance(self.placements(info, edge.from_stage)[src.data_axis], Replicate)
            for info in edge.values
        ]
        edge_values.drops_gradient = [int(not is_first and is_replicated) for is_replicated in replicated]
        return edge_values


def segment_edges(program: StageProgram, first: int) -> list["_C.EdgeValues"]:
    """What goes between the segments of a stage, in C++ form; `first`: the number of its first one."""
    out = []
    for edge in () if program.segments is None else program.segments.edges:
        edge_values = _C.EdgeValues()
        edge_values.from_stage, edge_values.to_stage = first + edge.from_segment, first + edge.to_segment
        edge_values.from_positions = [value.output for value in edge.values]
        edge_values.to_positions = [value.input for value in edge.values]
        edge_values.is_differentiable = [int(value.is_differentiable) for value in edge.values]
        edge_values.drops_gradient = [0] * len(edge.values)
        edge_values.has_producer = edge_values.has_consumer = edge_values.is_passing = True
        edge_values.is_local = not edge.is_sent
        out.append(edge_values)
    return out


def segment_moves(edge: SegmentEdge, mesh: StageMesh, *, is_gradient: bool) -> list[Move]:
    """What a microbatch moves between two segments of a stage."""
    moves = []
    for value in edge.values:
        if is_gradient and not value.is_differentiable:
            continue
        src, dst = (value.gradient_src, value.gradient_dst) if is_gradient else (value.src, value.dst)
        moves.append(Move.of(value.shape, value.dtype, (mesh.values_grid, src), (mesh.values_grid, dst)))
    return moves
