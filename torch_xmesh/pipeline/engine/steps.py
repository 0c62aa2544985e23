"""A pipeline engine's steps on one rank: cut the batch, run the schedule, bring losses and outputs home."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from torch_xmesh.arguments import flag
from torch_xmesh.pipeline.capture.node_forms import tensors_of
from torch_xmesh.pipeline.cut.losses import needs_target
from torch_xmesh.pipeline.cut.microbatch import loss_weights
from torch_xmesh.pipeline.cut.values import MOST_SIZES
from torch_xmesh.pipeline.engine.auto import Cuts, StepPlan
from torch_xmesh.pipeline.engine.comparing import StepComparison
from torch_xmesh.pipeline.engine.measuring import MemoryMeter
from torch_xmesh.pipeline.engine.outputs import whole_outputs
from torch_xmesh.pipeline.engine.place import EnginePlace
from torch_xmesh.pipeline.engine.rank_shards import RankShards
from torch_xmesh.pipeline.engine.sample_order import SampleOrder
from torch_xmesh.pipeline.engine.sized_places import SizedPlaces
from torch_xmesh.pipeline.engine.sizes import InputSizes, SizedPlace
from torch_xmesh.pipeline.engine.stage import StepState
from torch_xmesh.pipeline.engine.step_agreement import DifferentCallsError, StepAgreement, StepFacts, scale_bits
from torch_xmesh.pipeline.engine.step_batch import StepArguments, StepBatch
from torch_xmesh.pipeline.ranks.clocks import now_ns
from torch_xmesh.pipeline.ranks.exchange import TensorExchange, exchange_of_shards
from torch_xmesh.pipeline.ranks.refused import StepRefusedError
from torch_xmesh.pipeline.schedule.schedule import Schedule
from torch_xmesh.pipeline.state.numbers import numbers_of
from torch_xmesh.pipeline.state.training import PipelineScaler


def _text_of(failure: Exception | None) -> str | None:
    return None if failure is None else str(failure) or type(failure).__name__


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
        self._sized = SizedPlaces(place)
        self._comparison = StepComparison(place, compare_batches)
        self._agreement = StepAgreement(place.transfers, {**self._inputs.texts, **self._comparison.texts})
        self._shared_losses: dict[int, TensorExchange] = {}  # by number of microbatches
        self._loss_shares = place.source.loss_shares(len(place.meshes) - 1) if place.has_last else None
        self._settled: dict[Any, None] = {}  # for which ranks have compared what they run
        self._rank_shards = RankShards(place.transfers)

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
        batch, sized, order, cuts, plan = self._agree(call)
        sizes = list(order.sizes)
        place.forward.works = sized.works
        for work in sized.works.values():
            work.program.begin_step()
        state = place.forward.step = StepState(self.number, sizes, is_train)
        state.keeps_outputs = call.return_outputs and is_last
        state.targets, state.codes = batch.targets, batch.codes
        self.ran = plan.schedule if is_train else Schedule(plan.schedule.core.forwards())
        self.ran_early = place.overlap and plan.early_weights
        auto = place.auto if plan.is_measured else None
        if auto is not None:
            held = (batch.arguments.tree, batch.target.tree, batch.inputs, batch.targets)
            state.meter = MemoryMeter(place, tensors_of(held))
        place.source.begin_step(is_train)
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
                sized.partition.inputs_of_units(place.stages, batch.inputs),
                has_backward=is_train,
                weights_key=self._weights_key(order),
                runs_weights_early=plan.early_weights,
                is_measured=auto is not None,
                loss_weights=weights,
                weights_done=place.forward.weights_done if is_train and place.source.sums_gradients else None,
            )
        self.entered_ns = entered_ns
        self.after.clear()
        with self._timed("gradients") if is_train and place.source.sums_gradients else contextlib.nullcontext():
            place.source.end_step(is_train)
        if is_train:
            self._end_gradients()
        place.sharded.release()
        with self._timed("losses"):
            self._share_losses(state, is_last, call.losses, has_losses=is_train or batch.has_loss)
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
        place.transfers.traffic.await_ends()  # what is aborted later must not be taken for a result
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
        return hash((order.sizes, self._sized.last_key, trained)) & (2**63 - 1)

    def _end_gradients(self) -> None:
        sharded, sync = self._place.sharded, self._place.sync
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

    def _agree(self, call: StepArguments) -> tuple[StepBatch, SizedPlace, SampleOrder, Cuts, StepPlan]:
        """Checks the arguments on every rank before any of them computes; ranks in the middle see no batch."""
        batch, mine, failure = None, None, None
        numbers: dict[str, int] = {}
        try:
            batch, numbers = self._take(call)
            mine = self._facts(call, batch)
        except Exception as error:
            failure = error
        situations = set() if batch is None else batch.situations
        try:
            name = "step()" if call.is_train else "evaluate()"
            facts, told, has_news = self._agreement.agree(
                name, mine, numbers, _text_of(failure), self._place.ways.has_news(situations)
            )
        except DifferentCallsError:
            raise
        except StepRefusedError as refused:
            raise refused if failure is None else StepRefusedError(failure) from failure
        assert batch is not None
        self._comparison.agreed()
        batch.complete()
        samples = facts.target if facts.arguments is None else facts.arguments
        if samples is None:
            text = "the batch has no tensor to cut into microbatches: every argument is constant or replicated"
            raise StepRefusedError(ValueError(text))
        size = samples, facts.shards or 1
        foreseen = self._sized.number(size)
        sized, order, cuts, plan = self._sized.ready(batch, self._inputs.shapes(told), size, call.is_train)
        has_news = has_news or foreseen != len(order.sizes)
        situation = cuts.shapes, order.sizes, call.is_train, self._place.own.is_training
        self._settle(batch, sized, order, situation, has_news)
        return batch, sized, order, cuts, plan

    def _take(self, call: StepArguments) -> tuple[StepBatch, dict[str, int]]:
        """The batch, and numbers that others compare with theirs. Raises what is wrong on this rank."""
        self._check(call)
        place = self._place
        batch = StepBatch(place, call, self._rank_shards)
        place.source.check_step(batch.samples, is_sync=self.is_sync, is_train=call.is_train)
        batch.check_part()
        numbers = {**self._inputs.told(batch.shapes), **self._comparison.modes(), **self._comparison.values(batch)}
        if call.is_train:
            place.sync.check_step()
        if batch.samples is not None and not batch.is_part:
            size = batch.samples, batch.shards or 1
            batch.cut(SampleOrder.of(size[0], self._sized.number(size), size[1]), self._loss_shares)
            if (foreseen := self._sized.foreseen(batch.shapes)) is not None:
                batch.find_codes(foreseen)
                numbers |= self._comparison.ways(batch.codes)
        return batch, numbers

    def _check(self, call: StepArguments) -> None:
        """Raises ValueError for what needs no batch to be seen."""
        place = self._place
        rank = place.transfers.rank
        flag("return_outputs", call.return_outputs)
        flag("sharded", call.is_sharded)
        if call.losses is not None and not hasattr(call.losses, "append"):
            raise ValueError(f"losses is a list that gets one loss per microbatch, got {type(call.losses).__name__}")
        if place.live is not None:
            place.live.check()
        if place.unset:
            raise ValueError(
                f"{next(iter(place.unset))} has no values on rank {rank}: the model was on the meta device; give an "
                "init_fn that sets it, or load a checkpoint (load_state_dict)"
            )
        if place.has_last and call.is_train and call.target is None and needs_target(place.loss_fn):
            raise ValueError(f"target is missing on rank {rank}, which has the last stage ({len(place.meshes) - 1})")

    def _facts(self, call: StepArguments, batch: StepBatch) -> StepFacts:
        is_last = self._place.has_last
        return StepFacts(
            arguments=batch.arguments.samples,
            target=batch.target.samples,
            shards=batch.shards,
            is_sync=int(self.is_sync),
            is_sharded=int(call.is_sharded) if batch.is_read else None,
            has_target=int(batch.target.tree is not None) if is_last else None,
            returns_outputs=int(call.return_outputs) if is_last else None,
            loss_scale=scale_bits(self._loss_scale()) if is_last and call.is_train else None,
            argument_shapes=batch.arguments.shapes_number,
            target_shapes=batch.target.shapes_number,
        )

    def _settle(self, batch: StepBatch, sized: SizedPlace, order: SampleOrder, situation: Any, has_news: bool) -> None:
        """The batch cut as all ranks do, and what recorded stages run; ranks compare that where it is new to one, or
        may be.

        Raises:
            StepRefusedError: something cannot be recorded, or ranks would compute something else.
        """
        failure = None
        try:
            batch.cut(order, self._loss_shares)
            batch.find_codes(sized)
        except ValueError as error:
            failure = error
        if has_news or situation not in self._settled:
            try:
                numbers = self._comparison.settling(batch)
                self._place.ways.compare(batch.situations, _text_of(failure), numbers, self._comparison.texts)
            except ValueError as refused:
                raise StepRefusedError(failure or refused) from refused
            self._settled[situation] = None
            if len(self._settled) > 4 * MOST_SIZES:
                del self._settled[next(iter(self._settled))]
        elif failure is not None:
            raise failure

    def _loss_scale(self) -> float:
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def _share_losses(self, state: StepState, is_last: bool, losses: Any, has_losses: bool) -> None:
        """The global losses of all microbatches, summed over the data shards of the last stage, on every rank."""
        self.loss = None
        mine, number = None, len(state.sizes)
        if number not in self._shared_losses:
            place = self._place
            made = exchange_of_shards(place.transfers, f"losses of {number}", place.meshes[-1], number + 1)
            self._shared_losses[number] = made
        if is_last:
            there = dict(zip(state.losses, numbers_of(list(state.losses.values())), strict=True))
            shares = [there.get(microbatch, 0.0) for microbatch in range(number)]
            mine = torch.tensor([*shares, float(has_losses)], dtype=torch.float64, device="cpu")
            if self._loss_shares is not None:
                mine[:number] = self._loss_shares.total(mine[:number].clone())
        told = self._shared_losses[number].exchange(mine)
        *means, is_there = told.tolist()
        if not is_there:
            return
        weights = loss_weights(state.sizes, self._place.scale_grads)
        self.loss = sum(weight * loss for weight, loss in zip(weights, means, strict=True))
        if losses is not None and is_last:
            last = self._place.meshes[-1]
            told = told.to(last.device)
            for microbatch in range(number):
                own = state.losses.get(microbatch)
                alone = last.num_shards == 1 and self._loss_shares is None and own is not None
                losses.append(own if alone else told[microbatch].to(torch.float32 if own is None else own.dtype))
