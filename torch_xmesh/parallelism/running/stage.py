"""A stage of a plan as a module that runs on each device's parts.

recorded forward --> operator by operator: parts as it takes them (Moved) --> the call, or its rule --> parts as it
                     leaves them --> where several read it: as the plan holds it (Moved)
"""

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from torch_xmesh import _C
from torch_xmesh.parallelism.judge import placements_of
from torch_xmesh.parallelism.loops import PARTIAL, REPLICATED, WHOLE, Choice, End, State, choice_along
from torch_xmesh.parallelism.operators import Operator, Recorded, Site, Value
from torch_xmesh.parallelism.plan import ParallelPlan, PlannedStage
from torch_xmesh.parallelism.running.calls import RULES, Call, Way
from torch_xmesh.parallelism.running.collectives import Moves, Seen, Step
from torch_xmesh.parallelism.running.crossing import changed_of, ports_of
from torch_xmesh.parallelism.running.fetching import Fetch, Fetched, InTurn, not_kept
from torch_xmesh.parallelism.running.local_rules import DRAWING
from torch_xmesh.parallelism.running.loss import LossShares, has_samples, sample_axes
from torch_xmesh.pipeline.state.gradient_sync import local_of


class ShardedStage(nn.Module):
    """A stage of a plan on its mesh. Parameters are DTensors, placed as the plan keeps them, under the model's own
    names.

    It is given the model's arguments that it reads, whole, and this device's parts of the values that enter it. It
    gives a tuple of this device's parts of those that later stages need; the last stage the model's outputs.

    Args:
        model: with values; they are the same on all devices.
        recorded: its forward, as the plan's was.
        num_samples: of a microbatch, where the model's outputs go to a loss that is computed on each device's samples;
            None: they stay as the plan leaves them.
        on_collective: told of each collective that is run.

    Raises:
        ValueError: something of the plan cannot be run.
    """

    def __init__(
        self,
        model: nn.Module,
        recorded: Recorded,
        plan: ParallelPlan,
        number: int,
        mesh: DeviceMesh,
        *,
        num_samples: int | None = None,
        on_collective: Seen | None = None,
    ) -> None:
        super().__init__()
        planned = plan.stages[number]
        self.recorded, self._mesh, self._mesh_shape = recorded, mesh, tuple(mesh.shape)
        if self._mesh_shape != planned.mesh_shape:
            raise ValueError(f"the plan's mesh is {planned.mesh_shape}, got one of {self._mesh_shape}")
        self._ports = ports_of(recorded, plan)[number]
        self._changed = changed_of(recorded, self._ports)
        self._collectives = plan.collectives
        self._axes: list[Any] = [(size, *links) for size, links in zip(planned.mesh_shape, planned.links, strict=True)]
        self._moves = Moves(mesh, on_collective)
        self._costs: dict[tuple[Any, ...], _C.ConversionCosts] = {}
        self._held = {(one.why, one.name): End(one.state, one.gradient) for one in planned.held}
        self._choices = _choices(recorded, planned, self._ports.operators)
        self._states = {one.name: one.state for one in planned.parameters}
        self._left = self._left_states(number + 1 == len(plan.stages) and num_samples is not None, num_samples)
        self._in_parts = {one.name: one for one in planned.parameters if one.zero_level}
        self._gradients: dict[str, State] = {}
        self._calls = {operator: self._call(operator) for operator in self._choices}
        self._dead_after = self._last_reads()
        self._ways_out = {value: self._way(value, self._end_of(value), end) for value, end in self._left.items()}
        for operator, choice in self._choices.items():
            self._check(recorded.forward.operators[operator], choice, recorded.sites[operator])
        self._in_turn = {name for name, one in self._in_parts.items() if one.zero_level == 3}
        self._layers_in_turn = self._fetched_together(planned)
        self._own = self._own_parts(model)
        self._read: dict[str, torch.Tensor] = {}
        self._summed_later: list[Value] = []
        if number == 0:
            self._keep_unread(model, {one.name for stage in plan.stages for one in stage.parameters})
        for path, module in self.named_modules():
            module.training = model.get_submodule(path).training
        self._modes = [(module, module.training) for module in self.modules()]
        self.begin_step()

    # What is made ready.

    def _check(self, operator: Operator, choice: Choice, site: Site) -> None:
        if site.node.op == "call_module":
            raise ValueError(f"{operator.name}: modules that are called as one cannot be run in parts")
        if operator.draws and operator.kind not in DRAWING and _draws(site.node):
            raise ValueError(f"{operator.name} draws random numbers: that cannot be run in parts")
        if operator.kind == "kl_div" or (operator.loops.once and operator.kind not in RULES):
            raise ValueError(f"{operator.name}: {operator.kind} cannot be run in parts")
        own = {one.label for one in operator.loops.within} & {*choice.axes}
        if own and operator.kind not in RULES:
            raise ValueError(f"{operator.name} with loop {min(own)} sharded cannot be run")

    def _taken(self, number: int) -> list[Way]:
        operator, choice = self.recorded.forward.operators[number], self._choices[number]
        out = []
        for value, end in zip(operator.reads, choice.inputs, strict=True):
            has_gradient = value.requires_grad and operator.requires_grad
            if value.is_parameter and not self._is_tied(value):
                self._gradients.setdefault(value.name, end.gradient)
                out.append(Way(value.name))
                continue
            held = self._end_of(value)
            back = self._steps(value, end.gradient, held.gradient) if has_gradient else ()
            out.append(Way(value.name, self._steps(value, held.value, end.value), back, has_gradient))
        return out

    def _call(self, number: int) -> Call:
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
        takes = self._taken(number)
        return Call(operator, choice, site, self._moves, takes=takes, leaves=leaves, changes=changes)

    def _way(self, value: Value, before: End, after: End) -> Way:
        there = self._steps(value, before.value, after.value)
        back = self._steps(value, after.gradient, before.gradient) if value.requires_grad else ()
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

    def _is_tied(self, value: Value) -> bool:
        return ("parameter", value.name) in self._held

    def _end_of(self, value: Value) -> End:
        """How a value lies for its readers."""
        for why in ("readers", "entering", "parameter"):
            if (why, value.name) in self._held:
                end = self._held[why, value.name]
                if why == "parameter":
                    self._gradients.setdefault(value.name, end.gradient)
                return end
        if value.maker is None or value.maker not in self._choices:  # an argument, or another stage's
            return self._all
        operator = self.recorded.forward.operators[value.maker]
        return self._all if operator.is_constant else self._choices[value.maker].outputs[operator.makes.index(value)]

    @property
    def _whole(self) -> State:
        return (-1,) * len(self._mesh_shape)

    def _steps(self, value: Value, before: State, after: State) -> tuple[Step, ...]:
        key = (value.shape, value.num_bytes)
        if key not in self._costs:
            self._costs[key] = _C.ConversionCosts(value.shape, value.num_bytes, self._axes, self._collectives)
        return self._moves.steps(self._costs[key], key, before, after)

    def _left_states(self, is_settled: bool, num_samples: int | None) -> dict[Value, End]:
        """How what leaves is left. `is_settled`: the loss is computed on each device's samples of the outputs."""
        planned = {value: self._held.get(("leaving", value.name), self._end_of(value)) for value in self._ports.leaving}
        if not is_settled:
            return planned
        made = {value: end.value for value, end in planned.items() if value.maker in self._choices}
        axes = sample_axes(made, num_samples, len(self._mesh_shape))
        self.loss_shares = LossShares(self._moves, axes, [has_samples(value, num_samples) for value in planned])
        state = tuple(0 if axis in axes else REPLICATED for axis in range(len(self._mesh_shape)))
        by_samples = End(state, state)
        added_up = tuple(PARTIAL if held == 0 else REPLICATED for held in state)
        whole = End(self._whole, added_up)  # each device's loss adds to the gradient
        return {value: by_samples if has_samples(value, num_samples) else whole for value in planned}

    def _own_parts(self, model: nn.Module) -> dict[str, torch.Tensor]:
        out: dict[str, torch.Tensor] = {}
        tensors = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        for value in self.recorded.given.values():
            if value.name not in self._states or not value.is_parameter or value.name in out:
                continue
            whole = tensors[value.name]
            steps = self._steps(value, self._whole, self._kept_state(value.name))
            part = self._moves.run(whole.detach(), steps, value.name, "parameter").clone()
            owner, _, name = value.name.rpartition(".")
            place = self._place(owner)
            if isinstance(whole, nn.Parameter):
                parameter = nn.Parameter(self._placed(part, self._kept_state(value.name)), whole.requires_grad)
                place.register_parameter(name, parameter)
                out[value.name] = parameter
            else:
                out[value.name] = part
                is_persistent = name not in model.get_submodule(owner)._non_persistent_buffers_set
                place.register_buffer(name, part, persistent=is_persistent)
        kept = {id(tensors[name]): one for name, one in out.items()}
        for name, whole in model.named_parameters(remove_duplicate=False):
            if name not in out and isinstance(one := kept.get(id(whole)), nn.Parameter):  # another name of the same
                owner, _, key = name.rpartition(".")
                self._place(owner).register_parameter(key, one)
        return out

    def _keep_unread(self, model: nn.Module, read: set[str]) -> None:
        """What no stage reads is kept whole by the first, under its name."""
        for name, parameter in model.named_parameters():
            if name not in read:
                owner, _, key = name.rpartition(".")
                kept = self._placed(parameter.detach().clone(), self._whole)
                self._place(owner).register_parameter(key, nn.Parameter(kept, parameter.requires_grad))
        for name, buffer in model.named_buffers():
            if name not in read:
                owner, _, key = name.rpartition(".")
                is_persistent = key not in model.get_submodule(owner)._non_persistent_buffers_set
                self._place(owner).register_buffer(key, buffer.detach().clone(), persistent=is_persistent)

    def _placements(self, name: str) -> tuple[Placement, ...]:
        return tuple(placements_of(self._kept_state(name)))

    def _placed(self, part: torch.Tensor, state: State) -> DTensor:
        return DTensor.from_local(part, self._mesh, placements_of(state), run_check=False)

    def _used(self, value: Value) -> torch.Tensor:
        """This device's part of a parameter or a buffer, as its readers find it."""
        return self._read.get(value.name, local_of(self._own[value.name]))

    def _kept_state(self, name: str) -> State:
        """How a parameter lies between steps: in parts, if the plan keeps it so."""
        in_parts = self._in_parts.get(name)
        return self._states[name] if in_parts is None or in_parts.zero_state is None else in_parts.zero_state

    def _place(self, path: str) -> nn.Module:
        place: nn.Module = self
        for name in path.split(".") if path else ():
            if name not in place._modules:
                place.add_module(name, nn.Module())
            place = place.get_submodule(name)
        return place

    # A microbatch.

    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """One microbatch."""
        taken = zip((*self._ports.arguments, *self._ports.entering), given, strict=True)
        parts: dict[Value, Any] = {value: one.clone() if value in self._changed else one for value, one in taken}
        for node, value in self.recorded.given.items():
            if node.op == "get_attr" and not value.is_parameter:
                parts[value] = self.recorded.recording.constants[str(node.target)]
            elif node.op == "get_attr" and value.name in self._own and value.name not in self._in_turn:
                parts[value] = self._used(value)
        in_turn: dict[Value, tuple[Fetch, int]] = {}
        for number, call in self._calls.items():
            if self._in_turn:
                self._run_in_turn(number, parts, in_turn)
            else:
                call.run(parts)
            for value in self._dead_after.get(number, ()):
                parts.pop(value, None)
        return tuple(way.moved(parts[value], self._moves) for value, way in self._ways_out.items())

    def _run_in_turn(self, number: int, parts: dict[Value, Any], known: dict[Value, tuple[Fetch, int]]) -> None:
        """A call before which parameters may have to be fetched."""
        own = self._reads_in_turn(number)
        if any(value not in known for value in own):
            self._fetch(self._layers_in_turn[number], parts, known)
        with not_kept([(*known[value], parts[value]) for value in own]):
            self._calls[number].run(parts)

    @property
    def coordinate(self) -> tuple[int, ...]:
        """Of this device in the mesh."""
        return self._moves.coordinate

    @property
    def _all(self) -> End:
        """Every device has all of a value, and of its gradient."""
        return End(self._whole, self._whole)

    def _reads_in_turn(self, number: int) -> list[Value]:
        """The parameters that an operator reads and each microbatch fetches."""
        reads = dict.fromkeys(self.recorded.forward.operators[number].reads)
        return [value for value in reads if value.is_parameter and value.name in self._in_turn]

    def _fetched_together(self, planned: PlannedStage) -> dict[int, list[Value]]:
        """By the operator that is the first to read one of a layer's, the parameters that are fetched then."""
        layer_of = {one.name: one.layer for one in planned.operators}
        out: dict[int, list[Value]] = {}
        known: set[Value] = set()
        first: dict[int | None, int] = {}
        for number in self._choices:
            for value in self._reads_in_turn(number):
                if value not in known:
                    known.add(value)
                    layer = layer_of[self.recorded.forward.operators[number].name]
                    out.setdefault(first.setdefault(layer, number), []).append(value)
        return out

    def _fetch(self, values: Sequence[Value], parts: dict[Value, Any], known: dict[Value, tuple[Fetch, int]]) -> None:
        parameters, own = [], []
        for value in values:
            kept, whole = self._kept_state(value.name), self._states[value.name]
            there, back = self._steps(value, kept, whole), self._steps(value, self._gradients[value.name], kept)
            parameters.append(InTurn(value.name, there, back))
            own.append(self._read[value.name])
        fetch = Fetch(self._moves, parameters, [part.detach() for part in own])
        wholes = Fetched.apply(fetch, *own)  # type: ignore[no-untyped-call]
        for number, (value, whole) in enumerate(zip(values, wholes, strict=True)):
            parts[value], known[value] = whole, (fetch, number)

    # A step.

    def output_states(self) -> dict[str, State]:
        """How the model's outputs are left, by value."""
        return {value.name: end.value for value, end in self._left.items()}

    def has_first_modes(self) -> bool:
        """Whether all modules are in the modes, of training and evaluation, in which they came."""
        return all(module.training == mode for module, mode in self._modes)

    def check_parameters(self) -> None:
        """Raises ValueError where a parameter was frozen or unfrozen, or has hooks, which would not be called."""
        for value in self.recorded.given.values():
            own = self._own.get(value.name) if value.is_parameter else None
            if not isinstance(own, nn.Parameter):
                continue
            if own.requires_grad != value.requires_grad:
                raise ValueError(f"parameter {value.name} was frozen or unfrozen: with a plan it stays as it came")
            if own._backward_hooks or own._post_accumulate_grad_hooks:
                raise ValueError(f"parameter {value.name} has a hook: with a plan gradients come to it once a step")

    @torch.no_grad()
    def begin_step(self) -> None:
        """Parameters as this step's microbatches read them: those in parts are fetched, once for all."""
        taken = []
        for value in self.recorded.given.values():
            own = self._own.get(value.name) if value.is_parameter else None
            if not isinstance(own, nn.Parameter):
                continue
            taken.append(value)
        local = [local_of(self._own[value.name]).detach() for value in taken]
        steps = [self._steps(value, self._kept_state(value.name), self._read_state(value.name)) for value in taken]
        names = [value.name for value in taken]
        read = self._moves.run_together(local, steps, names, "parameter")
        for value, one in zip(taken, read, strict=True):
            self._read[value.name] = one.requires_grad_(value.requires_grad)
            in_parts = self._in_parts.get(value.name)
            if in_parts is not None and in_parts.zero_level == 2:
                one.register_post_accumulate_grad_hook(functools.partial(self._add_up_later, value))  # type: ignore[no-untyped-call]

    def _read_state(self, name: str) -> State:
        """How microbatches find a parameter: in parts, if each of them fetches it."""
        return self._kept_state(name) if name in self._in_turn else self._states[name]

    def _add_up_later(self, value: Value, read: torch.Tensor) -> None:
        """At the end of this backward, with others."""
        if not self._summed_later:
            torch.autograd.Variable._execution_engine.queue_callback(self._add_up_now)
        self._summed_later.append(value)

    def _add_up_now(self) -> None:
        later, self._summed_later = self._summed_later, []
        self._add_up(later, "backward")

    def finish_gradients(self) -> None:
        """Once all microbatches are through: gradients are added up over devices, and lie as the parameters do."""
        given = self.recorded.given.values()
        self._add_up([value for value in given if value.is_trained and value.name in self._read], "gradient")

    @torch.no_grad()
    def _add_up(self, values: Sequence[Value], why: str) -> None:
        """The gradients of parameters as they were read go to the parameters."""
        own = [value for value in dict.fromkeys(values) if self._read[value.name].grad is not None]
        names = [value.name for value in own]
        steps = [
            () if name in self._in_turn else self._steps(value, self._gradients[name], self._kept_state(name))
            for name, value in zip(names, own, strict=True)
        ]
        grads = [cast(torch.Tensor, self._read[name].grad) for name in names]
        for name, way, part in zip(names, steps, self._moves.run_together(grads, steps, names, why), strict=True):
            placed = self._placed(part if not way else part.clone(), self._kept_state(name))
            parameter = self._own[name]
            parameter.grad = placed if parameter.grad is None else parameter.grad + placed
            self._read[name].grad = None


def _choices(recorded: Recorded, planned: PlannedStage, numbers: Sequence[int]) -> dict[int, Choice]:
    """By operator."""
    axes = {one.name: one.axes for one in planned.operators}
    operators, whole = recorded.forward.operators, (WHOLE,) * len(planned.mesh_shape)
    return {
        number: choice_along(operators[number].loops, axes.get(operators[number].name, whole)) for number in numbers
    }


def _draws(node: fx.Node) -> bool:
    """Whether it does with these arguments: attention does where it drops weights."""
    places = {"scaled_dot_product_attention": 4, "multi_head_attention_forward": 10}
    place = places.get(getattr(node.target, "__name__", ""))
    if place is None:
        return True
    return bool(node.kwargs.get("dropout_p", node.args[place] if len(node.args) > place else 0.0))
