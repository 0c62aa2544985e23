"""A recorded forward of a stage, made ready to run on each device's parts.

operator by operator: parts as it takes them (Moved) --> the call, or its rule --> parts as it leaves them
                      --> where several read it: as the plan holds it (Moved)
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from torch_xmesh.parallelism.conversions import Conversions
from torch_xmesh.parallelism.loops import PARTIAL, REPLICATED, WHOLE, Choice, End, State, choice_along
from torch_xmesh.parallelism.operators import Recorded, Site, Value
from torch_xmesh.parallelism.plan import ParallelPlan, PlannedStage
from torch_xmesh.parallelism.rows.experts import CLASSES
from torch_xmesh.parallelism.running.calls import OperatorCall, Way
from torch_xmesh.parallelism.running.collectives import Moves
from torch_xmesh.parallelism.running.compiled import CompiledRun, Compiler
from torch_xmesh.parallelism.running.experts import WHOLE_BECAUSE
from torch_xmesh.parallelism.running.fetching import not_kept
from torch_xmesh.parallelism.running.loss import LossShares, has_samples, sample_axes
from torch_xmesh.parallelism.running.parameters import InTurnKnown, StageParameters, in_turn_of
from torch_xmesh.parallelism.running.stage_parts import changed_of, stage_parts


@dataclasses.dataclass(frozen=True)
class _Region:
    """An activation checkpoint.

    Attributes:
        takes: what its operators read and others make.
        leaves: what they make and others read.
    """

    takes: tuple[Value, ...]
    leaves: tuple[Value, ...]


class ShardedForward:
    """What a stage does with a microbatch, in one mode, of training and evaluation.

    Args:
        recorded: the model's forward in that mode, its operators those of the plan.
        num_samples: samples of a microbatch, where the model's outputs go to a loss that is computed on each device's
            samples; None: outputs stay as the plan leaves them.
        called: modules that are called as one, by name.

    Attributes:
        gradients: by name, how a parameter's gradient lies behind the operators that read it.
        loss_shares: how devices share the loss, on the last stage, if each computes the loss of its samples; else None.
        whole_because: why its backward is never split; empty where that depends on the graph.

    Raises:
        ValueError: something of it cannot be run in parts.
    """

    def __init__(
        self,
        recorded: Recorded,
        plan: ParallelPlan,
        number: int,
        moves: Moves,
        conversions: Conversions,
        num_samples: int | None,
        called: Mapping[str, nn.Module],
    ) -> None:
        planned = plan.stages[number]
        self.recorded, self._moves, self._conversions, self._called = recorded, moves, conversions, called
        self._ports = stage_parts(recorded, plan)[number]
        self._changed = changed_of(recorded, self._ports)
        self._changed_memory = frozenset(memory for memory, _, _ in recorded.recording.mutations)
        self._held = {(held.why, held.name): End(held.state, held.gradient) for held in planned.held}
        self._choices = _choices(recorded, planned, self._ports.operators)
        self.loss_shares: LossShares | None = None
        self._left = self._left_states(number + 1 == len(plan.stages) and num_samples is not None, num_samples)
        self.gradients: dict[str, State] = {}
        self._calls = {operator: self._call(operator) for operator in self._choices}
        has_experts = any(recorded.forward.operators[i].kind in CLASSES for i in self._calls)
        self.whole_because = WHOLE_BECAUSE if has_experts else ""
        self._dead_after = self._last_reads()
        self._ways_out = {value: self._way(value, self._end_of(value), end) for value, end in self._left.items()}
        in_turn = in_turn_of(planned)
        self._in_turn = {operator: self._reads_among(in_turn, operator) for operator in self._choices}
        self._layers = self._fetched_together(planned)
        self._constants, self._kept = self._read_of_model(planned)
        self._turns, self._regions = self._in_regions()
        self._compiled: dict[int, CompiledRun] = {}  # by its first operator

    def _read_of_model(self, planned: PlannedStage) -> tuple[dict[Value, torch.Tensor], list[Value]]:
        """What its operators read, or it leaves, that the model holds: constants, and the parameters and buffers that
        are there before the first operator."""
        read = {source for number in self._calls for source in self.recorded.sites[number].sources} | self._left.keys()
        kept = {parameter.name for parameter in planned.parameters} - in_turn_of(planned)
        constants = {}
        own = []
        for node, value in self.recorded.given.items():
            if node.op != "get_attr" or value not in read:
                continue
            if not value.is_parameter:
                constants[value] = self.recorded.recording.constants[str(node.target)]
            elif value.name in kept:
                own.append(value)
        return constants, own

    def left_states(self) -> dict[str, State]:
        """How what leaves is left, by value."""
        return {value.name: end.value for value, end in self._left.items()}

    def check_like(self, first: "ShardedForward") -> None:
        """Raises ValueError where more than what is done between differs from another mode's."""
        for mine, theirs in (
            (self._ports.arguments, first._ports.arguments),
            (self._ports.entering, first._ports.entering),
        ):
            if [value.name for value in mine] != [value.name for value in theirs]:
                raise ValueError("in the other a stage is given other values")
        if self.left_states() != first.left_states():
            raise ValueError("in the other a stage leaves other values")
        if any(first.gradients.get(name, state) != state for name, state in self.gradients.items()):
            raise ValueError("in the other gradients of parameters lie otherwise")

    def run(self, given: Sequence[torch.Tensor], own: StageParameters) -> tuple[torch.Tensor, ...]:
        """A microbatch."""
        taken = zip((*self._ports.arguments, *self._ports.entering), given, strict=True)
        parts: dict[Value, Any] = {value: part.clone() if value in self._changed else part for value, part in taken}
        parts.update(self._constants)
        parts.update((value, own.read(value)) for value in self._kept)
        fetched: InTurnKnown = {}
        for numbers in self._turns:
            region = self._regions.get(numbers[0])
            if region is not None and torch.is_grad_enabled():
                self._run_region(numbers, region, parts, own)
            else:
                self._run(numbers, parts, own, fetched)
        return tuple(way.moved(parts[value], self._moves) for value, way in self._ways_out.items())

    def _run(
        self,
        numbers: Sequence[int],
        parts: dict[Value, Any],
        own: StageParameters,
        fetched: InTurnKnown,
        *,
        is_region: bool = False,
    ) -> None:
        """Operators in order; of a checkpoint nothing is kept anyhow."""
        inside = 0  # operators left of a compiled run that is through
        for number in numbers:
            if number in self._compiled:
                self._compiled[number].run(parts)
                inside = len(self._compiled[number].numbers)
            if inside:
                inside -= 1
                self._drop_dead(number, parts)
                continue
            call, in_turn = self._calls[number], self._in_turn[number]
            if number in self._layers:
                own.fetch(self._layers[number], parts, fetched)
            if not in_turn or is_region:
                call.run(parts)
            else:
                wholes = {value: parts[value] for value in in_turn}
                parts.update((value, call.cast(whole)) for value, whole in wholes.items())
                with not_kept([(*fetched[value], parts[value]) for value in in_turn]):
                    call.run(parts)
                parts.update(wholes)
            self._drop_dead(number, parts)

    def _drop_dead(self, number: int, parts: dict[Value, Any]) -> None:
        """Values that no operator behind this one reads."""
        for value in self._dead_after.get(number, ()):
            parts.pop(value, None)

    def compile(self, compiler: Compiler) -> None:
        """From now on what is between collectives runs compiled; but what reads parameters that each microbatch
        fetches."""
        self._compiled = {}
        for turn in self._turns:
            for is_fetched, numbers in itertools.groupby(turn, key=lambda number: bool(self._in_turn[number])):
                if not is_fetched:
                    for run in compiler.runs([*numbers], self._calls, self._dead_after):
                        self._compiled[run.numbers[0]] = run

    def _run_region(
        self, numbers: Sequence[int], region: "_Region", parts: dict[Value, Any], own: StageParameters
    ) -> None:
        """An activation checkpoint: backward does it once more, with its collectives."""
        num_runs = 0

        def compute(*given: Any) -> tuple[Any, ...]:
            nonlocal num_runs
            inside = dict(zip(region.takes, given, strict=True))
            num_runs += 1
            with self._moves.again() if num_runs > 1 else contextlib.nullcontext():
                self._run(numbers, inside, own, {}, is_region=True)
            return tuple(inside[value] for value in region.leaves)

        given = [parts[value] for value in region.takes]
        made = torch.utils.checkpoint.checkpoint(compute, *given, use_reentrant=False)
        for number in numbers:
            self._drop_dead(number, parts)
        parts.update(zip(region.leaves, made, strict=True))

    def _taken(self, number: int) -> list[Way]:
        operator, choice = self.recorded.forward.operators[number], self._choices[number]
        out = []
        for value, end in zip(operator.reads, choice.inputs, strict=True):
            has_gradient = value.requires_grad and operator.requires_grad
            if value.is_parameter and not self._is_tied(value):
                self.gradients.setdefault(value.name, end.gradient)
                out.append(Way(value.name))
                continue
            held = self._end_of(value)
            back = self._conversions.steps(value, end.gradient, held.gradient) if has_gradient else ()
            out.append(Way(value.name, self._conversions.steps(value, held.value, end.value), back, has_gradient))
        return out

    def _call(self, number: int) -> OperatorCall:
        operator, choice, site = (
            self.recorded.forward.operators[number],
            self._choices[number],
            self.recorded.sites[number],
        )
        leaves = [
            self._way(value, end, self._held.get(("readers", value.name), end))
            for value, end in zip(operator.makes, choice.outputs, strict=True)
        ]
        changes = any(changer is site.node for _, _, changer in self.recorded.recording.mutations)
        owns = not changes and self._is_changed_later(site)
        takes = self._taken(number)
        module = self._called[str(site.node.target)] if site.node.op == "call_module" else None
        return OperatorCall(
            operator, choice, site, self._moves, takes=takes, leaves=leaves, changes=changes, owns=owns, module=module
        )

    def _is_changed_later(self, site: Site) -> bool:
        """Whether a call makes memory of its own, and that or what it reads is changed in place."""
        facts = self.recorded.recording.facts
        made, read = facts[site.node].memory, {key for node in site.node.all_input_nodes for key in facts[node].memory}
        return made.isdisjoint(read) and not self._changed_memory.isdisjoint(made | read)

    def _way(self, value: Value, before: End, after: End) -> Way:
        there = self._conversions.steps(value, before.value, after.value)
        back = self._conversions.steps(value, after.gradient, before.gradient) if value.requires_grad else ()
        return Way(value.name, there, back, value.requires_grad)

    def _last_reads(self) -> dict[int, list[Value]]:
        """By operator, the values of which it is the last to read anything."""
        last = {value: number for number in self._choices for value in self.recorded.sites[number].sources}
        last.update(
            (value, number)
            for number in self._choices
            for value in self.recorded.forward.operators[number].makes
            if value not in last
        )
        out: dict[int, list[Value]] = {}
        for value, number in last.items():
            if value not in self._left:
                out.setdefault(number, []).append(value)
        return out

    def _reads_among(self, names: frozenset[str], number: int) -> list[Value]:
        reads = dict.fromkeys(self.recorded.forward.operators[number].reads) if names else {}
        return [value for value in reads if value.is_parameter and value.name in names]

    def _fetched_together(self, planned: PlannedStage) -> dict[int, list[Value]]:
        """By the operator that is the first to read one of a layer's, the parameters that are fetched then."""
        layer_of = {sharded.name: sharded.layer for sharded in planned.operators}
        out: dict[int, list[Value]] = {}
        known: set[tuple[Value, int | None]] = set()
        first: dict[tuple[int | None, int | None, bool], int] = {}
        for number, values in self._in_turn.items():
            operator = self.recorded.forward.operators[number]
            for value in values:
                if (value, operator.checkpoint) not in known:  # a checkpoint has its own
                    known.add((value, operator.checkpoint))
                    layer = layer_of[operator.name], operator.checkpoint, operator.is_given_again
                    out.setdefault(first.setdefault(layer, number), []).append(value)
        return out

    def _in_regions(self) -> tuple[list[list[int]], dict[int, "_Region"]]:
        """Operators, in lists: those of an activation checkpoint in one. And by their first one what it is given."""
        operators, sites = self.recorded.forward.operators, self.recorded.sites
        here = {*self._ports.arguments, *self._ports.entering, *self.recorded.given.values()}
        here.update(value for number in self._calls for value in operators[number].makes)
        turns: list[list[int]] = []
        regions: dict[int, _Region] = {}
        for checkpoint, found in itertools.groupby(self._calls, key=lambda number: operators[number].checkpoint):
            numbers = [*found]
            turns.append(numbers)
            if checkpoint is None:
                continue
            made = {value: None for number in numbers for value in operators[number].makes}
            fetched = {value for number in numbers for value in self._in_turn[number]}
            dead = {value for number in numbers for value in self._dead_after.get(number, ())}
            takes = {value: None for number in numbers for value in sites[number].sources if value in here}
            regions[numbers[0]] = _Region(
                tuple(value for value in takes if value not in made and value not in fetched),
                tuple(value for value in made if value not in dead),
            )
        return turns, regions

    def _is_tied(self, value: Value) -> bool:
        return ("parameter", value.name) in self._held

    def _end_of(self, value: Value) -> End:
        """How a value lies for its readers."""
        for why in ("readers", "entering", "parameter"):
            if (why, value.name) in self._held:
                end = self._held[why, value.name]
                if why == "parameter":
                    self.gradients.setdefault(value.name, end.gradient)
                return end
        if value.maker is None or value.maker not in self._choices:  # an argument, or another stage's
            return self._all
        operator = self.recorded.forward.operators[value.maker]
        return self._all if operator.is_constant else self._choices[value.maker].outputs[operator.makes.index(value)]

    @property
    def _all(self) -> End:
        """Every device has all of a value, and of its gradient."""
        return End(self._whole, self._whole)

    @property
    def _whole(self) -> State:
        return (-1,) * len(self._moves.shape)

    def _left_states(self, is_settled: bool, num_samples: int | None) -> dict[Value, End]:
        """How what leaves is left. `is_settled`: the loss is computed on each device's samples of the outputs."""
        planned = {value: self._held.get(("leaving", value.name), self._end_of(value)) for value in self._ports.leaving}
        if not is_settled:
            return planned
        made = {value: end.value for value, end in planned.items() if value.maker in self._choices}
        axes = sample_axes(made, num_samples, len(self._moves.shape))
        self.loss_shares = LossShares(self._moves, axes, [has_samples(value, num_samples) for value in planned])
        state = tuple(0 if axis in axes else REPLICATED for axis in range(len(self._moves.shape)))
        by_samples = End(state, state)
        added_up = tuple(PARTIAL if held == 0 else REPLICATED for held in state)
        whole = End(self._whole, added_up)  # each device's loss adds to the gradient
        return {value: by_samples if has_samples(value, num_samples) else whole for value in planned}


def _choices(recorded: Recorded, planned: PlannedStage, numbers: Sequence[int]) -> dict[int, Choice]:
    """By operator."""
    axes = {operator.name: operator.axes for operator in planned.operators}
    operators, whole = recorded.forward.operators, (WHOLE,) * len(planned.mesh_shape)
    return {
        number: choice_along(operators[number].loops, axes.get(operators[number].name, whole)) for number in numbers
    }
