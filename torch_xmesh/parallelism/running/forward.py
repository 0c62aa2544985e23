"""A recorded forward of a stage, made ready to run on each device's parts.

operator by operator of its program: parts as it takes them (Moved) --> the call, or its rule --> parts as it leaves
                                     them --> where several read it: as the plan holds it (Moved)
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn

from torch_xmesh.parallelism.bound_program import BoundProgram
from torch_xmesh.parallelism.operators import Recorded, Site, Value
from torch_xmesh.parallelism.plan import PlannedStage
from torch_xmesh.parallelism.program import ARGUMENT, STAGE, PlannedProgram, core_programs
from torch_xmesh.parallelism.rows.experts import CLASSES
from torch_xmesh.parallelism.running.calls import OperatorCall
from torch_xmesh.parallelism.running.collectives import Moves
from torch_xmesh.parallelism.running.compiled import CompiledRun, Compiler
from torch_xmesh.parallelism.running.experts import WHOLE_BECAUSE
from torch_xmesh.parallelism.running.fetching import not_kept
from torch_xmesh.parallelism.running.parameters import StageParameters, in_turn_of
from torch_xmesh.parallelism.running.segment_fetches import SegmentFetches
from torch_xmesh.parallelism.running.ways import Way
from torch_xmesh.parallelism.segment_layout import SegmentLayout


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
        segments: what it is divided into; one, where it is not.
        num_arguments: of the model, that it is given before all else.
        left_states: how what leaves is left, by name.

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
        core = core_programs(program, planned.mesh_shape, planned.parameters)[0 if is_by_samples else 1]
        self.segments = SegmentLayout(bound, program, core, is_whole=not is_by_samples)
        given = [bound.values[at] for source in (ARGUMENT, STAGE) for at in bound.numbers(source)]
        self.num_arguments = len(bound.numbers(ARGUMENT))
        self._changed = changed_of(recorded, bound.operators, given)
        self._changed_memory = frozenset(memory for memory, _, _ in recorded.recording.mutations)
        leaving = program.leaving if is_by_samples else program.leaving_whole or program.leaving
        self.left_states = {program.values[read.value].name: read.state for read in leaving}
        self._ways_out = [
            Way(program.values[read.value].name)
            if place in self.segments.left
            else Way(program.values[read.value].name, read.there, read.back, read.gives_gradient)
            for place, read in enumerate(leaving)
        ]
        self._calls = {
            number: self._call(place, number, program, bound) for place, number in enumerate(bound.operators)
        }
        self._differentiable = {one.source for one in self.segments.passed if one.has_gradient}
        self._dead_after = self._last_reads()
        in_turn = in_turn_of(planned)
        self._in_turn = {operator: self._reads_among(in_turn, operator) for operator in self._calls}
        self._layers = self._fetched_together(planned)
        self._constants, self._kept = self._read_of_model(planned)
        self._turns, self._regions = self._in_regions()
        regions = (turn for turns in self._turns for turn in turns if turn[0] in self._regions)
        self._again = frozenset(itertools.chain.from_iterable(regions))
        self._compiled: dict[int, CompiledRun] = {}  # by its first operator

    @property
    def whole_because(self) -> list[str]:
        """By segment why its backward is never split; empty where that depends on the graph."""
        operators = self.recorded.forward.operators
        has_experts = [any(operators[number].kind in CLASSES for number in own) for own in self.segments.operators]
        return [WHOLE_BECAUSE if has_some else "" for has_some in has_experts]

    def readers(self) -> dict[str, set[int]]:
        """By name the segments that read a parameter or a buffer."""
        out: dict[str, set[int]] = {}
        for segment, numbers in enumerate(self.segments.operators):
            values = {*self._kept[segment], *(value for number in numbers for value in self._in_turn[number])}
            for value in values:
                out.setdefault(value.name, set()).add(segment)
        return out

    def _read_of_model(self, planned: PlannedStage) -> tuple[list[dict[Value, torch.Tensor]], list[list[Value]]]:
        """By segment what its operators read, or it leaves, that the model holds: constants, and the parameters and
        buffers that are there before the first operator."""
        kept = {parameter.name for parameter in planned.parameters} - in_turn_of(planned)
        held = {value: node for node, value in self.recorded.given.items() if node.op == "get_attr"}
        constants: list[dict[Value, torch.Tensor]] = []
        own: list[list[Value]] = []
        for segment, numbers in enumerate(self.segments.operators):
            read = {value for number in numbers for value in self._calls[number].reads}
            read.update(self.segments.outputs[segment])
            found = [value for value in held if value in read]
            constants.append(
                {
                    value: self.recorded.recording.constants[str(held[value].target)]
                    for value in found
                    if not value.is_parameter
                }
            )
            own.append([value for value in found if value.is_parameter and value.name in kept])
        return constants, own

    def run(self, given: Sequence[torch.Tensor], own: StageParameters) -> tuple[torch.Tensor, ...]:
        """A microbatch, one segment after the other, with collectives where an engine has transfers."""
        segments, passed = self.segments, dict[tuple[int, Value], torch.Tensor]()
        made: tuple[torch.Tensor, ...] = ()
        for segment in range(segments.count):
            inputs = [given[place] for place in segments.arguments[segment]]
            inputs += given[self.num_arguments :] if segment == 0 else ()
            inputs += [passed[segment, value] for value in segments.inputs[segment][len(inputs) :]]
            made = self.run_segment(segment, inputs, own)
            left = dict(zip(segments.outputs[segment], made, strict=True))
            for one in segments.passed:
                if one.from_segment == segment:
                    way = Way(one.source.name, one.there, one.back, one.has_gradient)
                    passed[one.to_segment, one.key] = way.moved(left[one.source], self._moves)
        return made

    def run_segment(
        self, segment: int, given: Sequence[torch.Tensor], own: StageParameters
    ) -> tuple[torch.Tensor, ...]:
        """One segment of a microbatch: what it is given and leaves is as `segments` says."""
        taken = zip(self.segments.inputs[segment], given, strict=True)
        parts: dict[Value, Any] = {value: part.clone() if value in self._changed else part for value, part in taken}
        parts.update(self._constants[segment])
        parts.update((value, own.read(value, segment)) for value in self._kept[segment])
        turns = self._turns[segment]
        regions = self._regions if torch.is_grad_enabled() else {}
        fetches = SegmentFetches(own, segment, itertools.chain(*turns), self._layers, self._again)
        for numbers in turns:
            if (region := regions.get(numbers[0])) is not None:
                self._run_region(segment, numbers, region, parts, own, fetches)
            else:
                self._run(numbers, parts, fetches)
        values = self.segments.outputs[segment]
        if segment + 1 == self.segments.count:
            return tuple(
                way.moved(parts[value], self._moves) for value, way in zip(values, self._ways_out, strict=True)
            )
        given_values = self.segments.inputs[segment]
        return tuple(self._passed(value, parts[value], is_given=value in given_values) for value in values)

    def _passed(self, value: Value, part: torch.Tensor, *, is_given: bool) -> torch.Tensor:
        """As it is left. What came in leaves as a view: where it came in autograd has an end, and none of it is behind
        that."""
        if value not in self._differentiable:
            return part.detach()
        return part.view_as(part) if is_given else part

    def _run(
        self, numbers: Sequence[int], parts: dict[Value, Any], fetches: SegmentFetches, *, is_region: bool = False
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
            fetches.before(number, parts)
            if not in_turn or is_region:
                call.run(parts)
            else:
                wholes = {value: parts[value] for value in in_turn}
                parts.update((value, call.cast(whole)) for value, whole in wholes.items())
                with not_kept([(*fetches.of(value), parts[value]) for value in in_turn]):
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
        for turn in itertools.chain.from_iterable(self._turns):
            for is_fetched, numbers in itertools.groupby(turn, key=lambda number: bool(self._in_turn[number])):
                if not is_fetched:
                    for run in compiler.runs([*numbers], self._calls, self._dead_after):
                        self._compiled[run.numbers[0]] = run

    def _run_region(
        self,
        segment: int,
        numbers: Sequence[int],
        region: "_Region",
        parts: dict[Value, Any],
        own: StageParameters,
        fetches: SegmentFetches,
    ) -> None:
        """An activation checkpoint: backward does it once more, with its collectives, and fetches anew."""
        num_runs = 0

        def compute(*given: Any) -> tuple[Any, ...]:
            nonlocal num_runs
            inside = dict(zip(region.takes, given, strict=True))
            num_runs += 1
            if num_runs == 1:
                self._run(numbers, inside, fetches, is_region=True)
                return tuple(inside[value] for value in region.leaves)
            with self._moves.again():
                again = SegmentFetches(own, segment, numbers, self._layers, self._again)
                self._run(numbers, inside, again, is_region=True)
            return tuple(inside[value] for value in region.leaves)

        given = [parts[value] for value in region.takes]
        made = torch.utils.checkpoint.checkpoint(compute, *given, use_reentrant=False)
        for number in numbers:
            self._drop_dead(number, parts)
        parts.update(zip(region.leaves, made, strict=True))

    def _call(self, place: int, number: int, program: PlannedProgram, bound: BoundProgram) -> OperatorCall:
        operator, site = self.recorded.forward.operators[number], self.recorded.sites[number]
        planned, values = program.operators[place], program.values
        takes, leaves = [], []
        for at, read in enumerate(planned.reads):
            name, key = values[read.value].name, self.segments.taken.get((place, at))
            way = Way(name) if key is not None else Way(name, read.there, read.back, read.gives_gradient)
            takes.append((key or bound.values[read.value], way))
        for at, result in enumerate(planned.results):
            value = values[result.value]
            is_sent = (place, at) in self.segments.sent
            leaves.append(Way(value.name, *(((), ()) if is_sent else (result.there, result.back)), value.has_gradient))
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
        """By operator, the values of which it is the last of its segment to read anything."""
        out: dict[int, list[Value]] = {}
        for segment, numbers in enumerate(self.segments.operators):
            last = {value: number for number in numbers for value in self._calls[number].reads}
            for number in numbers:
                for value in self._calls[number].makes:
                    last.setdefault(value, number)
            for value, number in last.items():
                if value not in self.segments.outputs[segment]:
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

    def _in_regions(self) -> tuple[list[list[list[int]]], dict[int, "_Region"]]:
        """By segment operators, in lists: those of an activation checkpoint in one. And by their first one what it is
        given."""
        operators = self.recorded.forward.operators
        turns: list[list[list[int]]] = []
        regions: dict[int, _Region] = {}
        for segment, own in enumerate(self.segments.operators):
            here = {*self.segments.inputs[segment], *self.recorded.given.values()}
            here.update(value for number in own for value in self._calls[number].makes)
            turns.append([])
            for checkpoint, found in itertools.groupby(own, key=lambda number: operators[number].checkpoint):
                numbers = [*found]
                turns[-1].append(numbers)
                if checkpoint is None:
                    continue
                made = {value: None for number in numbers for value in self._calls[number].makes}
                fetched = {value for number in numbers for value in self._in_turn[number]}
                dead = {value for number in numbers for value in self._dead_after.get(number, ())}
                takes = {value: None for number in numbers for value in self._calls[number].reads if value in here}
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
