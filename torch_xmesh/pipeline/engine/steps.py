"""A pipeline engine's steps on one rank: cut the batch, run the schedule, bring losses and outputs home."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.capture.node_forms import tensors_of
from torch_xmesh.pipeline.capture.regions import autocasts
from torch_xmesh.pipeline.cut.losses import needs_target
from torch_xmesh.pipeline.cut.microbatch import leaf_specs, loss_weights
from torch_xmesh.pipeline.cut.values import MOST_SIZES, Shapes
from torch_xmesh.pipeline.engine.auto import Cuts, StepPlan
from torch_xmesh.pipeline.engine.batch import (
    as_shards,
    local_microbatches,
    microbatch_columns,
    model_inputs,
    num_batch_shards,
    num_samples,
)
from torch_xmesh.pipeline.engine.comparing import StepComparison
from torch_xmesh.pipeline.engine.measuring import MemoryMeter
from torch_xmesh.pipeline.engine.outputs import whole_outputs
from torch_xmesh.pipeline.engine.place import EnginePlace
from torch_xmesh.pipeline.engine.rank_shards import RankShards, number_of_shapes, without_parts
from torch_xmesh.pipeline.engine.sample_order import SampleOrder
from torch_xmesh.pipeline.engine.setup import describe_values, digest
from torch_xmesh.pipeline.engine.sizes import InputSizes, SizedPlace
from torch_xmesh.pipeline.engine.stage import StepState
from torch_xmesh.pipeline.engine.step_agreement import DifferentCallsError, StepAgreement, StepFacts, scale_bits
from torch_xmesh.pipeline.ranks.clocks import now_ns
from torch_xmesh.pipeline.ranks.exchange import TensorExchange, exchange_of_shards
from torch_xmesh.pipeline.ranks.refused import StepRefusedError
from torch_xmesh.pipeline.schedule.schedule import Schedule
from torch_xmesh.pipeline.state.training import PipelineScaler


@dataclasses.dataclass(frozen=True)
class StepArguments:
    """What PipelineEngine.step (`is_train`) or evaluate was called with."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    losses: list[torch.Tensor] | None
    return_outputs: bool
    is_train: bool
    is_sharded: bool = False


@dataclasses.dataclass
class _Given:
    """A step's arguments on this rank, checked as far as one rank can.

    Attributes:
        shapes: shapes of the model's inputs that this rank reads.
        compared: numbers that others compare with theirs.
        is_part: tree and target are this rank's equal part of the batch, until `_whole`.
        inputs, targets: cut by `order`; None before.
        codes: what recorded stages of `sized` run for each microbatch.
    """

    tree: Any
    specs: list[Any]
    target: Any
    target_specs: list[Any]
    facts: StepFacts
    shapes: Shapes
    compared: dict[str, int]
    is_part: bool = False
    order: SampleOrder | None = None
    sized: SizedPlace | None = None
    codes: dict[int, list[Any]] = dataclasses.field(default_factory=dict)
    inputs: dict[int, list[list[torch.Tensor]]] = dataclasses.field(default_factory=dict)
    targets: list[Any] = dataclasses.field(default_factory=list)


def _text_of(failure: Exception | None) -> str | None:
    return None if failure is None else str(failure) or type(failure).__name__


def _situations(given: _Given | None) -> set[str]:
    """Those in which a batch's microbatches run, as Ways have them."""
    codes = {} if given is None else given.codes
    return {code.situation for several in codes.values() for code in several if code is not None}


class EngineSteps:
    """The steps of one place, one after another.

    Attributes:
        number: training steps done so far; dropout is seeded by it.
        loss: the last step's loss over the whole batch, or None.
        is_sync: gradients are summed over the data axis and over tied stages at the end of a step.
        scaler: scales the losses, or None.
        ran: what the last one ran.
        ran_early: W might run before their turn in it.
        entered_ns: when the last one was called, in nanoseconds of the steady clock.
        after: (name, begin, end) of what followed the last step's actions, in nanoseconds of the steady clock.
    """

    def __init__(self, place: EnginePlace, merge_spec: Any, compare_batches: bool) -> None:
        self.number = 0
        self.loss: float | None = None
        self.is_sync = True
        self.scaler: PipelineScaler | None = None
        self.ran = place.schedule
        self.ran_early = place.early_weights
        self.entered_ns = 0
        self.after: list[tuple[str, int, int]] = []
        self._runs = 0  # runs so far, of step() or evaluate()
        self._microbatches = 0  # that they had together
        self._place = place
        self._merge_spec = merge_spec
        self._inputs = InputSizes(place.partition)
        self._sized: dict[Any, SizedPlace] = {}  # by shapes of the inputs, the last ones used
        self._comparison = StepComparison(place, compare_batches)
        self._agreement = StepAgreement(place.transfers, {**self._inputs.texts, **self._comparison.texts})
        self._shared_losses: dict[int, TensorExchange] = {}  # by number of microbatches
        has_shares = place.planned is not None and place.has_last
        self._loss_shares = place.planned.loss_shares(len(place.meshes) - 1) if has_shares else None
        self._settled: dict[Any, None] = {}  # for which ranks have compared what they run
        self._rank_shards = RankShards(place.transfers)
        self._last_cut: dict[tuple[int, int], int] = {}  # into so many microbatches, by samples and shards

    def meet(self, call: str, failure: Exception | None = None) -> None:
        """Before a call that is none of the steps: all ranks are in it, and none refuses; `failure` says why this one
        does.

        Raises:
            StepRefusedError: on all ranks, where that is not so.
        """
        try:
            self._agreement.agree(call, refusal=_text_of(failure))
        except DifferentCallsError:
            raise
        except StepRefusedError as refused:
            raise refused if failure is None else StepRefusedError(failure) from failure

    def run(self, call: StepArguments) -> Any:
        """One step; everything as in PipelineEngine.step and evaluate.

        Raises:
            StepRefusedError: nothing has been computed; a later step may do.
        """
        place = self._place
        entered_ns = now_ns()
        is_last = place.has_last
        is_train = call.is_train
        given, sized, order, cuts, plan = self._agree(call)
        sizes = list(order.sizes)
        place.forward.works = sized.works
        for work in sized.works.values():
            work.program.begin_step()
        state = place.forward.step = StepState(self.number, sizes, is_train)
        state.keeps_outputs = call.return_outputs and is_last
        state.targets, state.codes = given.targets, given.codes
        self.ran = plan.schedule if is_train else Schedule(plan.schedule.core.forwards())
        self.ran_early = place.overlap and plan.early_weights
        auto = place.auto if plan.is_measured else None
        state.meter = None if auto is None else MemoryMeter(place, tensors_of((given.tree, given.target)))
        if place.planned is not None:
            place.planned.begin_step(is_train)
        if is_train:
            place.sharded.begin_step(self.is_sync)
            place.sync.begin_step(self.is_sync)
        weights = []
        if is_last and is_train:
            scale = self._loss_scale()
            weights = [scale * weight for weight in sized.works[len(place.meshes) - 1].loss_weights(sizes)]
        with torch.set_grad_enabled(is_train):
            place.core.run(
                place.forward,
                self.ran.core,
                place.index,
                self._runs,
                self._microbatches,
                sized.plans(sizes),
                given.inputs,
                has_backward=is_train,
                weights_key=self._weights_key(order),
                runs_weights_early=plan.early_weights,
                is_measured=auto is not None,
                loss_weights=weights,
            )
        self.entered_ns = entered_ns
        self.after.clear()
        if is_train:
            self._end_gradients()
        place.sharded.release()
        with self._timed("losses"):
            self._share_losses(state, is_last, call.losses, has_losses=is_train or self._has_loss(given.target))
        with self._timed("buffers"):
            place.buffers.run()
        output = None
        if state.keeps_outputs:
            if self._loss_shares is not None:
                self._loss_shares.gather(state.outputs)
            output = whole_outputs(
                place.transfers,
                sized.partition,
                meshes=place.meshes,
                order=order,
                outputs=state.outputs,
                merge_spec=self._merge_spec,
            )
        if auto is not None and state.meter is not None:
            with self._timed("schedule"):
                auto.note(place, state.meter, cuts, sizes)
        self._runs += 1
        self._microbatches += len(sizes)
        self.number += int(is_train)
        return output

    def _weights_key(self, order: SampleOrder) -> int:
        """Equal for steps of this rank in which weight gradients are computed alike; it tells nothing where no mesh has
        another rank."""
        if all(len(self._place.meshes[stage].ranks) == 1 for stage in self._place.stages):
            return 0
        trained = tuple(parameter.requires_grad for named in self._place.named.values() for parameter in named.values())
        return hash((order.sizes, next(reversed(self._sized)), trained)) & (2**63 - 1)

    def _end_gradients(self) -> None:
        sharded, sync = self._place.sharded, self._place.sync
        if self._place.planned is not None:
            with self._timed("gradients"):
                self._place.planned.end_step()
        if sharded.is_needed or (self.is_sync and sync.has_shards):
            with self._timed("gradients"):
                sharded.end_step(self.is_sync)
                if self.is_sync:
                    sync.sum_shards()
        if self.is_sync and sync.has_tied:
            with self._timed("tied"):
                sync.sum_tied()
        sync.end_step(self.is_sync)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = now_ns()
        yield
        self.after.append((name, begin, now_ns()))

    def _agree(self, call: StepArguments) -> tuple[_Given, SizedPlace, SampleOrder, Cuts, StepPlan]:
        """Checks the arguments on every rank before any of them computes; ranks in the middle see no batch."""
        given, failure = None, None
        try:
            given = self._take(call)
        except Exception as error:
            failure = error
        try:
            sizes = {} if given is None else {**self._inputs.told(given.shapes), **given.compared}
            name = "step()" if call.is_train else "evaluate()"
            facts, told, has_news = self._agreement.agree(
                name,
                None if given is None else given.facts,
                sizes,
                _text_of(failure),
                self._place.ways.has_news(_situations(given)),
            )
        except DifferentCallsError:
            raise
        except StepRefusedError as refused:
            raise refused if failure is None else StepRefusedError(failure) from failure
        assert given is not None
        self._comparison.agreed()
        self._whole(given)
        samples = facts.target if facts.arguments is None else facts.arguments
        if samples is None:
            text = "the batch has no tensor to cut into microbatches: every argument is constant or replicated"
            raise StepRefusedError(ValueError(text))
        batch = samples, facts.shards or 1
        foreseen = self._last_cut.get(batch, self._place.numbers(batch)[0])
        sized, order, cuts, plan = self._ready(given, self._inputs.shapes(told), batch, call.is_train)
        has_news = has_news or foreseen != len(order.sizes)
        self._settle(
            given, sized, order, (cuts.shapes, order.sizes, call.is_train, self._place.own.is_training), has_news
        )
        return given, sized, order, cuts, plan

    def _settle(self, given: _Given, sized: SizedPlace, order: SampleOrder, situation: Any, has_news: bool) -> None:
        """The batch cut as all ranks do, and what recorded stages run; ranks compare that where it is new to one, or
        may be.

        Raises:
            StepRefusedError: something cannot be recorded, or ranks would compute something else.
        """
        failure = None
        try:
            self._cut(given, order)
            self._find_codes(given, sized)
        except ValueError as error:
            failure = error
        if has_news or situation not in self._settled:
            try:
                self._place.ways.compare(
                    _situations(given),
                    _text_of(failure),
                    self._comparison.ways(given.codes),
                    self._comparison.texts,
                )
            except ValueError as refused:
                raise StepRefusedError(failure or refused) from refused
            self._settled[situation] = None
            if len(self._settled) > 4 * MOST_SIZES:
                del self._settled[next(iter(self._settled))]
        elif failure is not None:
            raise failure

    def _take(self, call: StepArguments) -> _Given:
        place = self._place
        rank, last = place.transfers.rank, place.meshes[-1]
        takers = [stage for stage in place.stages if place.partition.stages[stage].model_inputs]
        tree = (tuple(call.args), dict(sorted(call.kwargs.items()))) if takers else ((), {})
        target, is_train = call.target if place.has_last else None, call.is_train
        if call.losses is not None and not hasattr(call.losses, "append"):
            raise ValueError(f"losses is a list that gets one loss per microbatch, got {type(call.losses).__name__}")
        if place.live is not None:
            place.live.check()
        if place.unset:
            raise ValueError(
                f"{next(iter(place.unset))} has no values on rank {rank}: the model was on the meta device; give an "
                "init_fn that sets it, or load a checkpoint (load_state_dict)"
            )
        if place.has_last and is_train and target is None and needs_target(place.loss_fn):
            raise ValueError(f"target is missing on rank {rank}, which has the last stage ({len(place.meshes) - 1})")
        specs = []
        if takers:
            specs = leaf_specs(tree[0], place.chunk_specs["args"], "args")
            specs += leaf_specs(tree[1], place.chunk_specs["kwargs"], "kwargs")
            if not specs:
                raise ValueError(
                    f"the batch is missing on rank {rank}: its stage {takers[0]} takes "
                    f"{list(place.partition.stages[takers[0]].model_inputs)}"
                )
        target_specs = [] if target is None else leaf_specs(target, place.chunk_specs["target"], "target")
        is_part, whole, whole_target = call.is_sharded and place.planned is not None, tree, target
        if is_part:
            whole = self._rank_shards.shapes(tree, specs, place.meshes[takers[0]]) if takers else tree
            whole_target = self._rank_shards.shapes(target, target_specs, last) if target_specs else target
        elif call.is_sharded:
            tree = as_shards(tree, specs, [place.meshes[stage] for stage in takers], "the batch")
            target = as_shards(target, target_specs, [last] if target_specs else [], "target")
            whole, whole_target = tree, target
        samples = num_samples(whole, specs, "argument")
        of_target = num_samples(whole_target, target_specs, "target")
        if samples is not None and of_target is not None and samples != of_target:
            raise ValueError(f"the target has {of_target} samples, the arguments have {samples}")
        shards = {num_batch_shards(tree, specs, place.meshes[stage], "the batch") for stage in takers}
        shards.add(num_batch_shards(target, target_specs, last, "target") if target_specs else None)
        if len(shards - {None}) > 1:
            raise ValueError(f"tensors of one batch are sharded over {sorted(s for s in shards if s)} data shards")
        known = next((one for one in shards if one), None)
        given = _Given(
            tree,
            specs,
            target,
            target_specs,
            StepFacts(
                samples,
                of_target,
                known,
                int(self.is_sync),
                int(call.is_sharded) if takers or target_specs else None,
                int(target is not None) if place.has_last else None,
                int(call.return_outputs) if place.has_last else None,
                scale_bits(self._loss_scale()) if place.has_last and is_train else None,
                number_of_shapes(whole) if is_part and specs else None,
                number_of_shapes(whole_target) if is_part and target_specs else None,
            ),
            place.partition.shapes_of(*whole, takers) if takers else {},
            self._comparison.modes(),
            is_part,
        )
        if place.planned is not None:
            self._check_planned_samples(samples if samples is not None else of_target)
            place.planned.check_step(self.is_sync, is_train)
        alike, alike_target = tree, target
        if is_part:
            example = self._rank_shards.microbatch(whole, specs, place.schedule.num_microbatches)
            leaves, structure = pytree.tree_flatten(example)
            for stage in takers:
                place.partition.bind_leaves(leaves, structure, stage, any_size=True)
            alike = without_parts(tree, specs) if specs else tree
            alike_target = without_parts(target, target_specs) if target_specs else target
        given.compared |= self._comparison.values(alike, alike_target, takers, given.shapes, samples or of_target or 0)
        if is_train:
            place.sync.check_step()
        if (both := samples if samples is not None else of_target) is not None and not is_part:
            batch = both, known or 1
            numbers = place.numbers(batch)
            number = self._last_cut.get(batch, numbers[0])
            self._cut(given, SampleOrder.of(both, number, known or 1))
            if (foreseen := self._foreseen(given.shapes)) is not None:
                self._find_codes(given, foreseen)
                given.compared |= self._comparison.ways(given.codes)
        return given

    def _check_planned_samples(self, samples: int | None) -> None:
        each, number = self._place.partition.batch_size, self._place.schedule.num_microbatches
        if samples is not None and each and samples != each * number:
            raise ValueError(
                f"a step of this plan takes {each * number} samples, {number} microbatches of {each} as in the "
                f"example, and got {samples}. Every rank passes the whole batch, or with sharded=True an equal part of "
                "it; a DataLoader with drop_last=True gives no short batch"
            )

    def _whole(self, given: _Given) -> None:
        """The batch of which this rank gave a part. Called once all ranks have agreed to the step."""
        if not given.is_part:
            return
        place = self._place
        if given.specs:
            taker = next(stage for stage in place.stages if place.partition.stages[stage].model_inputs)
            given.tree = self._rank_shards.gather(given.tree, given.specs, place.meshes[taker], f"batch of {taker}")
        if given.target_specs:
            given.target = self._rank_shards.gather(given.target, given.target_specs, place.meshes[-1], "target")
        given.is_part = False

    def _has_loss(self, target: Any) -> bool:
        loss_fn = self._place.loss_fn
        return loss_fn is not None and (target is not None or not needs_target(loss_fn))

    def _loss_scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def _ready(
        self, given: _Given, shapes: Shapes, batch: tuple[int, int], is_train: bool
    ) -> tuple[SizedPlace, SampleOrder, Cuts, StepPlan]:
        """What the pipeline is for a batch of so many samples and shards, and what it runs. Called by all ranks alike,
        which know of each other's refusal.

        Raises:
            StepRefusedError: the stages do not work for it, or cannot share it out, or no schedule keeps the limit.
        """
        key = tuple(shapes.items()), autocasts()
        sized = self._sized.pop(key, None)
        if sized is None or batch not in sized.orders:
            failure, text, found = None, None, ""
            orders: dict[int, SampleOrder] = {}
            try:
                sized = sized or SizedPlace.at(self._place, shapes, self._usual(given))
                orders = sized.orders_of(*batch)
                if given.order is not None and given.order in orders.values():
                    self._find_codes(given, sized)
                found = digest(describe_values(sized.partition))
            except ValueError as error:
                failure, text = error, str(error)
            told = self._place.transfers.gather("sizes", (text, found, list(orders)))
            if failure is not None:
                raise StepRefusedError(failure) from failure
            for rank, (refusal, other, _) in zip(self._place.transfers.ranks, told, strict=True):
                if refusal is not None:
                    raise StepRefusedError(ValueError(f"rank {rank} refused the step: {refusal}"))
                if other != told[0][1]:
                    text = f"ranks disagree on the stages' values for inputs of shapes {list(shapes.values())}"
                    raise StepRefusedError(ValueError(f"{text}: ranks {self._place.transfers.ranks[0]} and {rank}"))
            assert sized is not None
            shared = set(orders).intersection(*(numbers for _, _, numbers in told))
            if not shared:
                text = f"there is no number of microbatches into which all ranks can cut a batch of {batch[0]} samples"
                raise StepRefusedError(ValueError(text))
            sized.orders[batch] = {number: orders[number] for number in sorted(shared)}
        self._sized[key] = sized
        if len(self._sized) > MOST_SIZES:
            del self._sized[next(iter(self._sized))]
        orders = sized.orders[batch]
        cuts = Cuts(batch[0], max(batch[1], self._place.most_shards), key, tuple(orders))
        plan = self._place.plan(cuts, is_train=is_train)
        order = orders[plan.schedule.num_microbatches]
        self._last_cut[batch] = len(order.sizes)
        if len(self._last_cut) > MOST_SIZES:
            del self._last_cut[next(iter(self._last_cut))]
        return sized, order, cuts, plan

    def _usual(self, given: _Given) -> dict[str, torch.Tensor]:
        """What this rank has of the batch, by the names of the model's inputs."""
        leaves = pytree.tree_leaves(given.tree)
        if len(leaves) != len(self._place.partition.argument_leaves):  # another rank's stages take the batch
            return {}
        found = self._place.partition.named_tensors(leaves)
        return {name: one.to_local() if isinstance(one, DTensor) else one for name, one in found.items()}

    def _foreseen(self, shapes: Shapes) -> SizedPlace | None:
        """What the pipeline is if the inputs that this rank does not read have the sizes that they had last."""
        for (known, modes), sized in reversed(self._sized.items()):
            if modes == autocasts() and all(shapes.get(name, shape) == shape for name, shape in known):
                return sized
        return None

    def _find_codes(self, given: _Given, sized: SizedPlace) -> None:
        """What recorded stages run for each microbatch."""
        if given.sized is sized or given.order is None:
            return
        given.codes = {
            stage: work.codes(given.order.sizes, given.inputs.get(stage))
            for stage, work in sized.works.items()
            if work.is_recorded
        }
        given.sized = sized

    def _cut(self, given: _Given, order: SampleOrder) -> None:
        """The model's inputs that each stage takes, by microbatch, and the targets."""
        if given.order == order:
            return
        place = self._place
        for stage in place.stages:
            if place.partition.stages[stage].model_inputs:
                columns, structure = microbatch_columns(
                    given.tree, given.specs, order=order, mesh=place.meshes[stage], what="the batch"
                )
                given.inputs[stage] = model_inputs(
                    place.partition, stage, columns=columns, structure=structure, sizes=order.sizes
                )
        if given.target is not None:
            given.targets = local_microbatches(
                given.target, given.target_specs, order=order, mesh=place.meshes[-1], what="target"
            )
            if self._loss_shares is not None:
                given.targets = self._loss_shares.targets(given.targets, given.target_specs)
        given.order, given.sized = order, None

    def _share_losses(self, state: StepState, is_last: bool, losses: Any, has_losses: bool) -> None:
        """The global losses of all microbatches, summed over the data shards of the last stage, on every rank."""
        self.loss = None
        mine, number = None, len(state.sizes)
        if number not in self._shared_losses:
            place = self._place
            made = exchange_of_shards(place.transfers, f"losses of {number}", place.meshes[-1], number + 1)
            self._shared_losses[number] = made
        if is_last:
            found = [state.losses.get(microbatch) for microbatch in range(number)]
            shares = [0.0 if loss is None else loss.item() for loss in found]
            mine = torch.tensor([*shares, float(has_losses)], dtype=torch.float64)
            if self._loss_shares is not None:
                mine[:number] = self._loss_shares.total(mine[:number].clone())
        told = self._shared_losses[number].exchange(mine)
        *means, is_there = told.tolist()
        if not is_there:
            return
        weights = loss_weights(state.sizes, self._place.scale_grads)
        self.loss = sum(weight * loss for weight, loss in zip(weights, means, strict=True))
        if losses is not None and is_last:
            for microbatch in range(number):
                own = state.losses.get(microbatch)
                alone = self._place.meshes[-1].num_shards == 1 and self._loss_shares is None and own is not None
                losses.append(own if alone else told[microbatch].to(torch.float32 if own is None else own.dtype))
