"""A recorded forward of a stage, made ready to run on each device's parts.

operator by operator of its program: parts as it takes them (Moved) --> the call, or its rule --> parts as it leaves
                                     them --> where several read it: as the plan holds it (Moved)
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from torch_xmesh.parallelism.operators import Recorded, Site, Value
from torch_xmesh.parallelism.plan import PlannedStage
from torch_xmesh.parallelism.program import ARGUMENT, STAGE, PlannedProgram, ProgramOperator
from torch_xmesh.parallelism.rows.experts import CLASSES
from torch_xmesh.parallelism.running.bound_program import BoundProgram
from torch_xmesh.parallelism.running.calls import OperatorCall, Way
from torch_xmesh.parallelism.running.collectives import Moves
from torch_xmesh.parallelism.running.compiled import CompiledRun, Compiler
from torch_xmesh.parallelism.running.experts import WHOLE_BECAUSE
from torch_xmesh.parallelism.running.fetching import not_kept
from torch_xmesh.parallelism.running.parameters import InTurnKnown, StageParameters, in_turn_of


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
        recorded: the model's forward in that mode.
        planned: the stage's table.
        program: what is followed.
        is_by_samples: each device is left the samples on which it computes the loss; else all of the outputs.
        called: modules that are called as one, by name.

    Attributes:
        left_states: how what leaves is left, by name.
        whole_because: why its backward is never split; empty where that depends on the graph.

    Raises:
        ValueError: something of it cannot be run in parts, or the program is of another forward.
    """

    def __init__(
        self,
        recorded: Recorded,
        planned: PlannedStage,
        program: PlannedProgram,
        moves: Moves,
        called: Mapping[str, nn.Module],
        *,
        is_by_samples: bool,
    ) -> None:
        self.recorded, self._moves, self._called = recorded, moves, called
        bound = BoundProgram(recorded, program)
        self._operators, self._values = bound.operators, bound.values
        self._given = [bound.values[at] for source in (ARGUMENT, STAGE) for at in bound.numbers(source)]
        self._changed = changed_of(recorded, bound.operators, self._given)
        self._changed_memory = frozenset(memory for memory, _, _ in recorded.recording.mutations)
        leaving = program.leaving if is_by_samples else program.leaving_whole or program.leaving
        self.left_states = {program.values[read.value].name: read.state for read in leaving}
        self._left = {
            bound.values[read.value]: Way(program.values[read.value].name, read.there, read.back, read.gives_gradient)
            for read in leaving
        }
        self._calls = {
            number: self._call(number, operator, program)
            for number, operator in zip(bound.operators, program.operators, strict=True)
        }
        has_experts = any(recorded.forward.operators[i].kind in CLASSES for i in self._calls)
        self.whole_because = WHOLE_BECAUSE if has_experts else ""
        self._dead_after = self._last_reads()
        in_turn = in_turn_of(planned)
        self._in_turn = {operator: self._reads_among(in_turn, operator) for operator in self._calls}
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

    def run(self, given: Sequence[torch.Tensor], own: StageParameters) -> tuple[torch.Tensor, ...]:
        """A microbatch."""
        taken = zip(self._given, given, strict=True)
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
        return tuple(way.moved(parts[value], self._moves) for value, way in self._left.items())

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

    def _call(self, number: int, planned: ProgramOperator, program: PlannedProgram) -> OperatorCall:
        operator, site = self.recorded.forward.operators[number], self.recorded.sites[number]
        names = [value.name for value in program.values]
        gradients = [value.has_gradient for value in program.values]
        takes = [Way(names[read.value], read.there, read.back, read.gives_gradient) for read in planned.reads]
        leaves = [
            Way(names[result.value], result.there, result.back, gradients[result.value]) for result in planned.results
        ]
        changes = any(changer is site.node for _, _, changer in self.recorded.recording.mutations)
        owns = not changes and self._is_changed_later(site)
        module = self._called[str(site.node.target)] if site.node.op == "call_module" else None
        return OperatorCall(
            operator, planned, site, self._moves, takes=takes, leaves=leaves, changes=changes, owns=owns, module=module
        )

    def _is_changed_later(self, site: Site) -> bool:
        """Whether a call makes memory of its own, and that or what it reads is changed in place."""
        facts = self.recorded.recording.facts
        made, read = facts[site.node].memory, {key for node in site.node.all_input_nodes for key in facts[node].memory}
        return made.isdisjoint(read) and not self._changed_memory.isdisjoint(made | read)

    def _last_reads(self) -> dict[int, list[Value]]:
        """By operator, the values of which it is the last to read anything."""
        last = {value: number for number in self._calls for value in self.recorded.sites[number].sources}
        last.update(
            (value, number)
            for number in self._calls
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
        here = {*self._given, *self.recorded.given.values()}
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


def changed_of(recorded: Recorded, numbers: Sequence[int], given: Sequence[Value]) -> frozenset[Value]:
    """The values given to a stage that its operators change in place."""
    operators, sites, facts = recorded.forward.operators, recorded.sites, recorded.recording.facts
    own = {sites[number].node for number in numbers}
    changed = {memory for memory, _, changer in recorded.recording.mutations if changer in own}
    places = {value: node for node, value in recorded.given.items()}
    for value in given:
        if value.maker is not None:
            places[value] = sites[value.maker].places[operators[value.maker].makes.index(value)]
    return frozenset(value for value in given if facts[places[value]].memory & changed)
