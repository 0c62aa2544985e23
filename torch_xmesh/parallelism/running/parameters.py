"""A stage's parameters: how each device keeps its parts, what microbatches read, where gradients go.

kept between steps --> once a step, or (ZeRO-3) by each microbatch: as the stage reads them --> segments
          gradients as the parameters lie <-- added up over devices, behind the last microbatch <--+
                                              that a segment has, or (ZeRO-2, 3) each one
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_xmesh.parallelism.conversions import AxisMove
from torch_xmesh.parallelism.judge import placements_of
from torch_xmesh.parallelism.loops import REPLICATED, State
from torch_xmesh.parallelism.operators import Recorded, Value
from torch_xmesh.parallelism.plan import PlannedStage
from torch_xmesh.parallelism.running.collectives import Moves
from torch_xmesh.parallelism.running.fetching import Fetch, FetchedLayer, InTurn, Underway
from torch_xmesh.parallelism.running.parcels import Member, Parcel, Sent, parcels_of
from torch_xmesh.pipeline.ranks.transfers import Transfers
from torch_xmesh.pipeline.state.gradient_sync import local_of
from torch_xmesh.spec import Mesh, mesh_grid


def in_turn_of(planned: PlannedStage) -> frozenset[str]:
    """The parameters that each microbatch fetches anew (ZeRO-3), by name."""
    return frozenset(parameter.name for parameter in planned.parameters if parameter.zero_level == 3)


class StageParameters:
    """Parameters and buffers of the model that a stage reads, in this device's parts, as the plan keeps, fetches and
    adds them up.

    Args:
        stage: its number.
        readers: by parameter the segments that read it. Each has an accumulator of its own; they are added in the order
            of segments, so that every order of actions gives the same bits.
        transfers: those of the pipeline, which carry what is not of one microbatch alone.
    """

    def __init__(
        self,
        recorded: Recorded,
        planned: PlannedStage,
        mesh: DeviceMesh,
        moves: Moves,
        *,
        stage: int,
        readers: Mapping[str, Sequence[int]],
        transfers: Transfers,
    ) -> None:
        self._recorded, self._mesh, self._moves = recorded, mesh, moves
        self._stage, self._readers, self._transfers = stage, readers, transfers
        self._planned = {parameter.name: parameter for parameter in planned.parameters}
        self._in_turn = in_turn_of(planned)
        self._own: dict[str, torch.Tensor] = {}
        self._read: dict[tuple[str, int], torch.Tensor] = {}  # by name and segment
        self._fetches: list[Parcel] = []
        self._sums: list[_Sum] = []
        self._fetching: dict[str, Sent] = {}
        self._layers: dict[tuple[tuple[str, ...], int], FetchedLayer] = {}
        self._ahead: set[Fetch] = set()  # on their way, and not yet needed
        self._going_back: tuple[Fetch, Underway] | None = None  # gradients of a layer's parts
        self._grid = Mesh(mesh_grid(mesh), device_type=mesh.device_type)

    # How they are kept.

    def keep(self, model: nn.Module, home: nn.Module, called: Mapping[str, nn.Module]) -> None:
        """This device's parts of the model's values, registered under its names in `home`, with the modules that are
        `called` as one, by name."""
        for name, module in called.items():
            owner, _, key = name.rpartition(".")
            _place(home, owner)._modules[key] = module
        tensors = _named_tensors(model)
        for value in self._recorded.given.values():
            if value.name not in self._planned or not value.is_parameter or value.name in self._own:
                continue
            whole, state = tensors[value.name], self._planned[value.name].kept_state
            steps = [AxisMove(axis, REPLICATED, dim) for axis, dim in enumerate(state) if dim != REPLICATED]
            part = self._moves.run(whole.detach(), steps, value.name, "parameter").clone()
            placed: torch.Tensor = self._placed(part, state)
            if isinstance(whole, nn.Parameter):
                placed = nn.Parameter(placed, whole.requires_grad)
            _register(model, home, value.name, placed)
            self._own[value.name] = placed
        kept = {id(tensors[name]): parameter for name, parameter in self._own.items()}
        for name, whole in tensors.items():
            known = kept.get(id(whole))
            if name not in self._own and known is not None:  # another name of the same
                _register(model, home, name, known)

    def keep_unread(self, model: nn.Module, home: nn.Module, read: set[str], called: Collection[str]) -> None:
        """What no stage reads, whole, under its names in `home`. Modules `called` as one have their own buffers."""
        within = tuple(f"{name}." for name in called)
        tensors = _named_tensors(model)
        elsewhere = {id(tensors[name]) for name in read}
        kept: dict[int, torch.Tensor] = {}
        for name, whole in tensors.items():
            is_parameter = isinstance(whole, nn.Parameter)
            if id(whole) in elsewhere or (name.startswith(within) and not is_parameter):
                continue
            if id(whole) not in kept:
                placed: torch.Tensor = self._placed(whole.detach().clone(), (REPLICATED,) * self._mesh.ndim)
                kept[id(whole)] = nn.Parameter(placed, whole.requires_grad) if is_parameter else placed
            _register(model, home, name, kept[id(whole)])

    def _placed(self, part: torch.Tensor, state: State) -> DTensor:
        return DTensor.from_local(part, self._mesh, placements_of(state), run_check=False)

    def _parameters(self) -> list[tuple[Value, nn.Parameter]]:
        """Those that the stage reads."""
        given = dict.fromkeys(value for value in self._recorded.given.values() if value.is_parameter)
        own = [(value, self._own.get(value.name)) for value in given]
        return [(value, parameter) for value, parameter in own if isinstance(parameter, nn.Parameter)]

    def check(self) -> None:
        """Raises ValueError where a parameter was frozen or unfrozen, or has hooks, which would not be called."""
        for value, own in self._parameters():
            if own.requires_grad != value.requires_grad:
                raise ValueError(f"parameter {value.name} was frozen or unfrozen: with a plan it stays as it came")
            if own._backward_hooks or own._post_accumulate_grad_hooks:
                raise ValueError(f"parameter {value.name} has a hook: with a plan gradients come to it once a step")

    # What a microbatch reads.

    def read(self, value: Value, segment: int) -> torch.Tensor:
        """This device's part of a parameter or a buffer of the stage, as operators of a segment take it; none that each
        microbatch fetches."""
        if value.name in self._fetching:
            self._arrive(self._fetching[value.name])
        own = self._own[value.name]
        return self._leaf(value.name, segment) if isinstance(own, nn.Parameter) else local_of(own)

    def _leaf(self, name: str, segment: int) -> torch.Tensor:
        if (name, segment) not in self._read:
            raise RuntimeError(f"parameter {name} is read before a step: a planned stage is run by its engine")
        return self._read[name, segment]

    def fetch_of(self, values: Sequence[Value], segment: int, before: Fetch | None) -> Fetch:
        """Parameters of a layer, for one microbatch; nothing has left yet. `before`: those of the layer before it."""
        names = tuple(value.name for value in values)
        leaves = [self._leaf(name, segment) for name in names]
        if (names, segment) not in self._layers:
            parameters = [
                InTurn(name, tuple(leaf.shape), leaf.dtype, self._planned[name].fetch, self._planned[name].sum)
                for name, leaf in zip(names, leaves, strict=True)
            ]
            lane = f"stage {self._stage}/segment {segment}/{', '.join(names)}"
            self._layers[names, segment] = FetchedLayer(parameters, self._moves, self._grid, self._transfers, lane)
        return Fetch(self._layers[names, segment], leaves, before, self._ahead, self._send_back)

    def _send_back(self, fetch: Fetch, gradients: Sequence[torch.Tensor | None]) -> None:
        """Gradients of a layer's wholes leave, once those of the layer behind it have come: no more are held."""
        self._take_back()
        self._going_back = fetch, fetch.layer.start(dict(enumerate(gradients)), "backward", is_back=True)

    @torch.no_grad()
    def _take_back(self) -> None:
        if self._going_back is None:
            return
        (fetch, underway), self._going_back = self._going_back, None
        for number, part in underway.wait().items():
            if part is not None:
                leaf = fetch.leaves[number]
                leaf.grad = part.clone() if leaf.grad is None else leaf.grad.add_(part)

    # A step.

    def plan(self) -> None:
        """What moves in every step is put into parcels; once all are kept."""
        taken = sorted(self._parameters(), key=lambda pair: min(self._readers[pair[0].name], default=0))
        own = {value.name: local_of(parameter) for value, parameter in taken}
        fetches = {name: () if name in self._in_turn else self._planned[name].fetch for name in own}
        self._fetches = parcels_of(
            [Member(name, tuple(part.shape), part.dtype, fetches[name]) for name, part in own.items()],
            self._moves,
            self._grid,
        )
        trained = [
            value.name for value, _ in reversed(taken) if value.requires_grad and value.name not in self._in_turn
        ]
        for is_each in (False, True):
            members = [
                Member(
                    name,
                    self._moves.shape_after(own[name].shape, fetches[name]),
                    own[name].dtype,
                    self._planned[name].sum,
                )
                for name in trained
                if (self._planned[name].zero_level == 2) is is_each
            ]
            for parcel in parcels_of(members, self._moves, self._grid):
                segments = {segment for member in parcel.members for segment in self._readers[member.name]}
                self._sums.append(_Sum(parcel, len(self._sums), frozenset(segments), is_each))

        for parcel in (*self._fetches, *(one.parcel for one in self._sums)):
            self._transfers.prepare(parcel.moves)

    @property
    def waiting(self) -> frozenset[int]:
        """The segments in each of whose B and W, or behind it, devices wait for each other."""
        out = {segment for one in self._sums if one.is_each for segment in one.segments}
        return frozenset(out.union(*(self._readers[name] for name in self._in_turn)))

    @torch.no_grad()
    def begin_step(self) -> None:
        """Those in parts are fetched, once for all of the step's microbatches."""
        self._fetching.clear()
        self._ahead.clear()
        self._going_back = None
        for one in self._sums:
            one.begin_step()
        own = {value.name: (value, local_of(parameter).detach()) for value, parameter in self._parameters()}
        for number, parcel in enumerate(self._fetches):
            parts = [own[member.name][1] for member in parcel.members]
            sent = parcel.start(self._transfers, f"stage {self._stage}/parameters/{number}", parts, "parameter")
            self._fetching.update((member.name, sent) for member in parcel.members)
        for name, (value, part) in own.items():
            if name not in self._fetching:
                way = () if name in self._in_turn else self._planned[name].fetch
                self._hand_out(name, self._moves.run(part, way, name, "parameter"), value.requires_grad)

    @torch.no_grad()
    def _arrive(self, sent: Sent) -> None:
        for member, read in zip(sent.parcel.members, sent.wait(), strict=True):
            assert read is not None
            self._hand_out(member.name, read, self._own[member.name].requires_grad)
            del self._fetching[member.name]

    def _hand_out(self, name: str, read: torch.Tensor, requires_grad: bool) -> None:
        """Each segment accumulates gradients of its own."""
        for segment in self._readers[name]:
            self._read[name, segment] = read.detach().requires_grad_(requires_grad)

    def weights_done(self, segment: int, microbatch: int, is_last: bool) -> None:
        """A B or W of a segment has run: gradients to which nothing is added any more, or those of ZeRO-2, leave."""
        for one in self._sums:
            if one.is_due(segment, microbatch, is_last):
                self._start(one)

    def end_step(self, is_train: bool) -> None:
        """All microbatches are through: gradients are added up over devices, and lie as the parameters do. Nothing of
        the step is on its way any more."""
        for sent in dict.fromkeys(self._fetching.values()):
            self._arrive(sent)
        for fetch in [*self._ahead]:
            fetch.drop()
        self._take_back()
        if not is_train:
            return
        for one in self._sums:
            if not one.is_each and one.sent is None:
                self._start(one)
        moved = {member.name for one in self._sums for member in one.parcel.members}
        for value, _ in self._parameters():
            if value.requires_grad and value.name not in moved:
                way = () if value.name in self._in_turn else self._planned[value.name].sum
                gradient = self._taken(value.name)
                if gradient is not None:
                    part = self._moves.run(gradient, way, value.name, "gradient")
                    self._add(value.name, part.clone() if way else part)
        for one in self._sums:
            self._finish(one)

    @torch.no_grad()
    def _start(self, one: "_Sum") -> None:
        self._finish(one)
        parts = [self._taken(member.name) for member in one.parcel.members]
        lane = f"stage {self._stage}/gradients/{one.number}"
        one.sent = one.parcel.start(self._transfers, lane, parts, "backward" if one.is_each else "gradient")

    def _finish(self, one: "_Sum") -> None:
        """What is on its way is waited for."""
        if one.sent is not None:
            for member, part in zip(one.parcel.members, one.sent.wait(), strict=True):
                if part is not None:
                    self._add(member.name, part)
            one.sent = None

    @torch.no_grad()
    def _taken(self, name: str) -> torch.Tensor | None:
        """The gradient that the stage's segments have accumulated, in the order of segments; they begin anew."""
        total: torch.Tensor | None = None
        for segment in self._readers[name]:
            leaf = self._read.get((name, segment))
            if leaf is not None and leaf.grad is not None:
                total, leaf.grad = leaf.grad if total is None else total + leaf.grad, None
        return total

    @torch.no_grad()
    def _add(self, name: str, part: torch.Tensor) -> None:
        placed, parameter = self._placed(part, self._planned[name].kept_state), self._own[name]
        parameter.grad = placed if parameter.grad is None else parameter.grad + placed


@dataclasses.dataclass
class _Sum:
    """Gradients that are added up over devices together.

    Attributes:
        segments: those that read one of their parameters.
        is_each: behind every microbatch (ZeRO-2); else once a step.
        done: the segments whose part is in, by microbatch, or under None of the step.
        sent: what is on its way.
    """

    parcel: Parcel
    number: int
    segments: frozenset[int]
    is_each: bool
    done: dict[int | None, set[int]] = dataclasses.field(default_factory=dict)
    sent: Sent | None = None

    def begin_step(self) -> None:
        self.done.clear()
        self.sent = None

    def is_due(self, segment: int, microbatch: int, is_last: bool) -> bool:
        """Whether now all is in, a B or W of a segment having run."""
        if segment not in self.segments or not (self.is_each or is_last):
            return False
        done = self.done.setdefault(microbatch if self.is_each else None, set())
        done.add(segment)
        return done == self.segments


def _named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, under all their names."""
    parameters: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return {**parameters, **dict(model.named_buffers(remove_duplicate=False))}


def _place(home: nn.Module, path: str) -> nn.Module:
    place = home
    for part in path.split(".") if path else ():
        place = cast(nn.Module, place._modules.setdefault(part, nn.Module()))
    return place


def _register(model: nn.Module, home: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Parameters as such, all else as buffers, persistent where the model's are. Names of attributes of `home` may be
    among the model's, so torch's own methods, which refuse these, are not called."""
    owner, _, key = name.rpartition(".")
    place = _place(home, owner)
    if isinstance(tensor, nn.Parameter):
        place._parameters[key] = tensor
        return
    place._buffers[key] = tensor
    if key in model.get_submodule(owner)._non_persistent_buffers_set:
        place._non_persistent_buffers_set.add(key)
