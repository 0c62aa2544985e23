"""A pipeline engine's steps on one rank: cut the batch, run the schedule, bring losses and outputs home."""

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from torch_xmesh import _C
from torch_xmesh.pipeline.engine_batch import (
    local_microbatches,
    microbatch_columns,
    model_inputs,
    num_samples,
)
from torch_xmesh.pipeline.engine_place import EnginePlace
from torch_xmesh.pipeline.engine_stage import StepState
from torch_xmesh.pipeline.engine_told import told_by, told_by_shards
from torch_xmesh.pipeline.microbatch import leaf_specs, loss_weights, microbatch_sizes
from torch_xmesh.pipeline.outputs import whole_outputs
from torch_xmesh.pipeline.state import PipelineScaler

_FACTS = (
    "the batch has {} samples",
    "step() (1) or evaluate() (0): {}",
    "gradients are summed in this step (0 in no_sync): {}",
)


class EngineSteps:
    """The steps of one place, one after another.

    Attributes:
        number: training steps done so far; dropout is seeded by it.
        loss: of the last one over the whole batch, or None.
        is_sync: gradients are summed over the data axis and over tied stages at the end of a step.
        scaler: scales the losses, or None.
        after: (name, begin, end) of what followed the last step's actions, in nanoseconds of the steady clock.
    """

    def __init__(self, place: EnginePlace, merge_spec: Any) -> None:
        self.number = 0
        self.loss: float | None = None
        self.is_sync = True
        self.scaler: PipelineScaler | None = None
        self.after: list[tuple[str, int, int]] = []
        self._turn = 0  # runs so far, of step() or evaluate()
        self._place = place
        self._merge_spec = merge_spec
        self._sizes: dict[int, list[int]] = {}  # of microbatches, by samples of the batch
        self._plans: dict[tuple[int, ...], list[_C.EdgePlans]] = {}
        self._leader = self._find_leader()
        self._facts = told_by(place.transfers, "step", self._leader, 3)
        self._shared_losses = told_by_shards(place.transfers, "losses", place.meshes[-1], place.num_microbatches + 1)

    def run(self, args: Any, kwargs: Any, target: Any, losses: Any, return_outputs: bool, is_train: bool) -> Any:
        """One step; everything as in PipelineEngine.step and evaluate."""
        place = self._place
        place.transfers.traffic.begin_turn(self._turn + 1)
        takes_inputs = any(place.partition.stages[k].model_inputs for k in place.stages)
        is_last = place.has_last
        args, kwargs = (tuple(args), dict(sorted(kwargs.items()))) if takes_inputs else ((), {})
        if is_last and is_train and target is None:
            raise ValueError(
                f"target is missing on rank {place.transfers.rank}, which has the last stage ({len(place.meshes) - 1})"
            )
        target = target if is_last else None
        tree = (args, kwargs)
        specs = []
        if takes_inputs:
            specs = leaf_specs(args, place.chunk_specs["args"], "args")
            specs += leaf_specs(kwargs, place.chunk_specs["kwargs"], "kwargs")
        target_specs = [] if target is None else leaf_specs(target, place.chunk_specs["target"], "target")
        if takes_inputs and not specs:
            stage = next(k for k in place.stages if place.partition.stages[k].model_inputs)
            raise ValueError(
                f"the batch is missing on rank {place.transfers.rank}: its stage {stage} takes "
                f"{list(place.partition.stages[stage].model_inputs)}"
            )
        sizes = self._agree_on_sizes(num_samples(tree, specs), num_samples(target, target_specs), is_train)
        state = place.forward.step = StepState(self.number, sizes, is_train)
        state.keeps_outputs = return_outputs and is_last
        inputs = self._bind(tree, specs, sizes)
        if is_last and target is not None:
            state.targets = local_microbatches(target, target_specs, sizes, place.meshes[-1], "target")
        schedule = place.schedule.core if is_train else place.schedule.core.forwards()
        if is_train:
            place.sharded.begin_step(self.is_sync)
            place.sync.begin_step(self.is_sync)
        weights = []
        if is_last and is_train:
            scale = 1.0 if self.scaler is None else self.scaler.get_scale()
            weights = [scale * weight for weight in place.works[len(place.meshes) - 1].loss_weights(sizes)]
        with torch.set_grad_enabled(is_train):
            place.core.run(schedule, place.index, self._turn, self._plans_for(sizes), inputs, is_train, weights)
        self.after.clear()
        if is_train and (place.sync.is_needed or place.sharded.is_needed):
            with self._timed("gradients"):
                place.sharded.end_step(self.is_sync)
                place.sync.end_step(self.is_sync)
        place.sharded.release()
        with self._timed("losses"):
            self._share_losses(state, is_last, losses, has_losses=is_train or target is not None)
        with self._timed("buffers"):
            place.buffers.run()
        output = None
        if state.keeps_outputs:
            output = whole_outputs(
                place.transfers,
                place.partition,
                place.meshes,
                sizes,
                state.outputs,
                self._merge_spec,
            )
        self._turn += 1
        self.number += int(is_train)
        return output

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = time.monotonic_ns()
        yield
        self.after.append((name, begin, time.monotonic_ns()))

    def _agree_on_sizes(self, samples: int | None, target_samples: int | None, is_train: bool) -> list[int]:
        """Samples per microbatch, told by the leader to all: ranks in the middle see no batch."""
        leader = self._leader
        if samples is not None and target_samples is not None and samples != target_samples:
            raise ValueError(f"the target has {target_samples} samples, the arguments have {samples}")
        mine = target_samples if samples is None else samples
        rank = self._place.transfers.rank
        if rank == leader and mine is None:
            raise ValueError(
                "the batch has no tensor to cut into microbatches: every argument is constant or replicated"
            )
        facts = [mine or 0, int(is_train), int(self.is_sync)]
        told = self._facts.exchange(torch.tensor(facts) if rank == leader else None).tolist()
        for name, one, other in zip(_FACTS, told, facts, strict=True):
            if one != other and not (name is _FACTS[0] and mine is None):
                raise ValueError(f"ranks disagree: {name.format(one)} on rank {leader}, {other} on rank {rank}")
        if told[0] not in self._sizes:
            sizes = microbatch_sizes(told[0], self._place.num_microbatches)
            self._place.boundaries.check_samples(sizes[0])
            self._place.boundaries.check_samples(sizes[-1])
            self._place.sharded.check_samples(sizes)
            self._sizes[told[0]] = sizes
        return self._sizes[told[0]]

    def _find_leader(self) -> int:
        """The rank that sees the batch, or the target if no batch is cut."""
        for stage, program in enumerate(self._place.partition.stages):
            if any(self._place.partition.values[name].batch_dim is not None for name in program.model_inputs):
                return self._place.meshes[stage].ranks[0]
        return self._place.meshes[-1].ranks[0]

    def _bind(self, tree: Any, specs: list[Any], sizes: list[int]) -> dict[int, list[list[torch.Tensor]]]:
        """By stage and microbatch, the model's inputs that the stage takes."""
        bound = {}
        for stage in self._place.stages:
            if self._place.partition.stages[stage].model_inputs:
                columns, structure = microbatch_columns(tree, specs, sizes, self._place.meshes[stage], "the batch")
                bound[stage] = model_inputs(self._place.partition, stage, columns, structure, sizes)
        return bound

    def _plans_for(self, sizes: list[int]) -> list["_C.EdgePlans"]:
        place, key = self._place, tuple(sizes)
        if key not in self._plans:
            plans = []
            for edge in place.edges:
                start, end = place.meshes[edge.from_stage], place.meshes[edge.to_stage]
                lane = f"{edge.from_stage}-{edge.to_stage}"
                if place.boundaries.is_local(edge):
                    plans.append(_C.EdgePlans(lane, edge.text, False, [], []))
                    continue
                forward = [place.transfers.prepare(place.boundaries.moves(edge, n, False)) for n in sizes]
                backward = []
                if edge.has_gradient:
                    backward = [place.transfers.prepare(place.boundaries.moves(edge, n, True)) for n in sizes]
                is_joint = set(start.ranks) == set(end.ranks)
                plans.append(_C.EdgePlans(lane, edge.text, is_joint, forward, backward))
            self._plans[key] = plans
        return self._plans[key]

    def _share_losses(self, state: StepState, is_last: bool, losses: Any, has_losses: bool) -> None:
        """The global losses of all microbatches, summed over the data shards of the last stage, on every rank."""
        self.loss = None
        mine = None
        if is_last:
            found = [state.losses.get(microbatch) for microbatch in range(self._place.num_microbatches)]
            shares = [0.0 if loss is None else loss.item() for loss in found]
            mine = torch.tensor([*shares, float(has_losses)], dtype=torch.float64)
        told = self._shared_losses.exchange(mine)
        *means, is_there = told.tolist()
        if not is_there:
            return
        weights = loss_weights(state.sizes, self._place.scale_grads)
        self.loss = sum(weight * loss for weight, loss in zip(weights, means, strict=True))
        if losses is not None and is_last:
            for microbatch in range(self._place.num_microbatches):
                own = state.losses.get(microbatch)
                alone = self._place.meshes[-1].num_shards == 1 and own is not None
                losses.append(own if alone else told[microbatch].to(torch.float32 if own is None else own.dtype))
