"""A plan as plain data: what runs where, sharded how, and what that is predicted to take. Printed, saved, compared."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch_xmesh.arguments import instance_of, read_text
from torch_xmesh.parallelism.conversions import AxisMove
from torch_xmesh.parallelism.loops import State
from torch_xmesh.parallelism.memory import Bytes
from torch_xmesh.parallelism.objective import Seconds
from torch_xmesh.parallelism.plan_json import plan_from_json, plan_to_json
from torch_xmesh.parallelism.plan_text import diff_text, plan_text
from torch_xmesh.parallelism.program import PlannedProgram


@dataclasses.dataclass(frozen=True)
class PlannedOperator:
    """How an operator is sharded.

    Attributes:
        axes: per mesh axis the loop that it shards, "-" where every device does the same, "+" where partial sums
            pass, "~" where those of gradients do.
        outputs: how each tensor that it makes is held.
        layer: which of the plan's layers it is in; None for a constant.
        loops: its loops by name, with the size that a mesh axis sharding it must divide; None where a file does not say
            it.
    """

    name: str
    kind: str
    module: str
    axes: tuple[str, ...]
    outputs: tuple[State, ...]
    shape: tuple[int, ...]
    layer: int | None
    is_heavy: bool
    is_known: bool
    loops: tuple[tuple[str, int], ...] | None = None


@dataclasses.dataclass(frozen=True)
class PlannedParameter:
    """How a parameter is kept.

    Attributes:
        state: per mesh axis the dim that it shards, -1 where it is whole.
        zero_level: 1: optimizer states are in parts; 2: gradients too; 3: the parameter too; 0: none.
        zero_state: how these parts lie.
        fetch: the moves that bring it from where it is kept to where operators read it: once a step, at level 3 in
            each microbatch, and once more where backward reads it.
        sum: those that bring its gradient home: at the end of a step, at levels 2 and 3 in each backward.
    """

    name: str
    shape: tuple[int, ...]
    state: State
    zero_level: int = 0
    zero_state: State | None = None
    fetch: tuple[AxisMove, ...] = ()
    sum: tuple[AxisMove, ...] = ()

    @property
    def kept_state(self) -> State:
        """How it lies between steps."""
        return self.state if self.zero_state is None else self.zero_state


@dataclasses.dataclass(frozen=True)
class PlannedValue:
    """A tensor that goes from one stage to a later one.

    Attributes:
        src, dst: how it is sharded on the stage that makes it, and on the one that reads it.
        forward_seconds, backward_seconds: how long the value is on its way, and its gradient.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    from_stage: int
    to_stage: int
    src: State
    dst: State
    forward_seconds: float
    backward_seconds: float
    has_gradient: bool


@dataclasses.dataclass(frozen=True)
class PlannedHeld:
    """How a stage holds a value in between: on its way from who makes it to who reads it.

    Attributes:
        why: "readers": several read it; "entering": from other stages; "leaving": for others, or the model's output;
            "parameter": one that several read.
        state, gradient: how the value and its gradient are held, per mesh axis.
    """

    name: str
    why: str
    state: State
    gradient: State


@dataclasses.dataclass(frozen=True)
class PlannedTie:
    """A parameter that several stages have: at the end of a step its gradients are added up over them.

    Attributes:
        seconds: how long that takes.
    """

    name: str
    stages: tuple[int, ...]
    seconds: float


@dataclasses.dataclass(frozen=True)
class PlannedCollective:
    """Collectives of a kind: what for ("forward", "backward" of a microbatch, "gradient", "parameter" of a step), along
    which axis, how many, how many bytes all together."""

    why: str
    collective: str
    axis: int
    count: int
    num_bytes: float


@dataclasses.dataclass(frozen=True)
class PlannedSegment:
    """What a stage computes between two transfers among its devices.

    Attributes:
        seconds: what a device spends on a microbatch, and once a step; collectives are those that it runs inside.
        is_whole: its backward is not split.
    """

    seconds: Seconds
    is_whole: bool = False


@dataclasses.dataclass(frozen=True)
class PlannedEdge:
    """What goes from a segment to a later one of its stage by a transfer, and back.

    Attributes:
        forward_seconds, backward_seconds: how long the values are on their way, and their gradients.
    """

    from_segment: int
    to_segment: int
    forward_seconds: float
    backward_seconds: float
    has_gradient: bool


@dataclasses.dataclass(frozen=True)
class PlannedStage:
    """A stage.

    Attributes:
        ranks: its devices, row-major in a mesh of `mesh_shape`.
        layers: the first of the plan's layers that it has, and the one behind its last.
        seconds: what a device spends on a microbatch, and once a step.
        bytes: what a device holds.
        in_flight: the most microbatches that it holds at once, with the plan's schedule.
        peak_bytes: the most bytes that a device holds at once.
        links, held: what programs are written from, where there are none yet: for each mesh axis the latency of a
            message, what a byte takes one device that sends to its neighbor, and, if that is more, one where all send
            to all; and values that are held otherwise than who makes them leaves them.
        gap: by which part of a microbatch's seconds another sharding of the stage that fits may be faster; 0: none is.
        is_whole: its backward is not split: I takes all of its seconds, and W none.
        programs: what it does with a microbatch, move by move: one for both modes of the model, or the one of the mode
            in which the model came, and that of the other mode if it can be run in that. Files of version 1 have none.
        segments, edges: what its segments are predicted to take, and what goes between them. Older files have none.
        is_on_one_host: its devices are: what goes among them does not leave it.
    """

    ranks: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    layers: tuple[int, int]
    operators: tuple[PlannedOperator, ...]
    parameters: tuple[PlannedParameter, ...]
    collectives: tuple[PlannedCollective, ...]
    seconds: Seconds
    bytes: Bytes
    in_flight: int
    peak_bytes: int
    links: tuple[tuple[float, ...], ...] = ()
    held: tuple[PlannedHeld, ...] = ()
    gap: float = 0.0
    is_whole: bool = False
    programs: tuple[PlannedProgram, ...] = ()
    segments: tuple[PlannedSegment, ...] = ()
    edges: tuple[PlannedEdge, ...] = ()
    is_on_one_host: bool = False


@dataclasses.dataclass(frozen=True)
class PredictedStep:
    """What a step is predicted to take, seconds.

    Attributes:
        total: the whole step.
        compute: computation of the stage that works longest, all microbatches together.
        collectives: that stage's collectives for microbatches, all together.
        sums: that stage's collectives on gradients and parameters at the end of the step.
        transfers: transfers of all values between stages, if they were sent one after the other.
        bubble: the rest of `total`, in which that stage waits.
        hidden: what that stage communicates while it computes: `total` is `compute`, `collectives`, `sums` and `bubble`
            without it.
        serial: the whole step without overlap: if each action of a stage ran its segments one after the other, with a
            schedule of whole stages; of a plan in halves that of the whole microbatch, where that was planned too. 0:
            that is not known (an older file).
    """

    total: float
    compute: float
    collectives: float
    sums: float
    transfers: float
    bubble: float
    hidden: float = 0.0
    serial: float = 0.0


@dataclasses.dataclass(frozen=True)
class ParallelPlan:
    """How a model runs on devices: stages, each sharded operator by operator on its mesh, and a schedule. Immutable.
    ``str(plan)`` is a table for people, :meth:`ParallelPlan.to_json` writes everything.

    Made by :func:`plan_parallel`, ``xm.presets`` or :meth:`ParallelPlan.from_json`.

    Attributes:
        model: name of the model's class.
        fingerprint: a hash of the model's operators and their shapes, for a microbatch of the plan's. A plan is for
            this model and this microbatch size.
        stages: the stages in order, each with its devices, operators, parameters and collectives.
        layers: for each layer the module in which it begins.
        values: the tensors that go from stage to stage.
        num_microbatches: microbatches per step.
        schedule: the schedule's name.
        schedule_csv: the schedule's actions, in torch's notation.
        step: what a step is predicted to take, in seconds, and for what.
        devices: number of devices.
        collectives: name of the cost model of collectives.
        ties: parameters that several stages have.
        notes: what a reader of the plan should know: what was assumed, what is not sharded.
        parts: into how many microbatches each one like the example is cut; 2: in halves, of which one computes while
            the other communicates.
        one_mode_because: why it does not run in the mode, of training and evaluation, in which the model was not when
            it was planned; empty where it does.
        device_type: of the mesh that it was planned for, where that says one. There a model on the meta device runs;
            others run where they are.
    """

    model: str
    fingerprint: str
    stages: tuple[PlannedStage, ...]
    layers: tuple[str, ...]
    values: tuple[PlannedValue, ...]
    num_microbatches: int
    schedule: str
    schedule_csv: str
    step: PredictedStep
    devices: int
    collectives: str
    title: str = "found"
    ties: tuple[PlannedTie, ...] = ()
    notes: tuple[str, ...] = ()
    one_mode_because: str = ""
    parts: int = 1
    device_type: str | None = None
    _explainer: Callable[["ParallelPlan", str], str] | None = dataclasses.field(
        default=None, repr=False, compare=False, kw_only=True
    )

    @property
    def predicted_seconds(self) -> float:
        """Predicted seconds of one training step."""
        return self.step.total

    def predicted_bytes(self, device: int) -> int:
        """The most bytes that a device holds at once, predicted. `device`: its global rank.

        Raises:
            ValueError: the plan does not use this device.
        """
        for stage in self.stages:
            if device in stage.ranks:
                return stage.peak_bytes
        raise ValueError(f"no stage is on device {device}")

    def stage_of(self, name: str) -> int:
        """The number of the stage that has an operator, a module or a parameter of this name; the first, if several do.

        Raises:
            ValueError: nothing of the plan has that name.
        """
        instance_of("name", name, str, "the name of an operator, a module or a parameter")
        for number, stage in enumerate(self.stages):
            names = {operator.name for operator in stage.operators} | {operator.module for operator in stage.operators}
            if name in names or any(parameter.name == name for parameter in stage.parameters):
                return number
        for number, stage in enumerate(self.stages):
            if any(f"{operator.module}.".startswith(f"{name}.") for operator in stage.operators):
                return number
        raise ValueError(f"the plan has no operator, module or parameter named {name!r}")

    def explain(self, name: str) -> str:
        """The other ways to shard an operator, or the operators of a module, as text: what the stage would take and
        hold with each, everything else chosen anew.

        Raises:
            ValueError: nothing has that name; or the plan was not made in this process, and knows no alternatives.
        """
        instance_of("name", name, str, "the name of an operator, a module or a parameter")
        if self._explainer is None:
            raise ValueError("only a plan that was made in this process can be explained, not one that was read")
        return self._explainer(self, name)

    def diff(self, other: "ParallelPlan") -> str:
        """In words, what `other` does differently, and how the predictions change; empty where nothing differs."""
        return diff_text(self, other)

    def plot(self, path: str | Path) -> None:
        """Draws devices over the time of a step, layers colored by how they are sharded (format by suffix).

        Raises:
            ImportError: matplotlib is not installed.
        """
        from torch_xmesh.parallelism.step_plot import plot_plan

        plot_plan(self, Path(path))

    def __str__(self) -> str:
        return plan_text(self)

    def __repr__(self) -> str:
        stages = " | ".join("x".join(map(str, stage.mesh_shape)) for stage in self.stages)
        return f"ParallelPlan({self.model}: {stages}, {self.schedule}, predicted_seconds={self.predicted_seconds:.6g})"

    def save(self, path: str | Path) -> None:
        """Writes :meth:`to_json` into a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "ParallelPlan":
        """Reads a file that :meth:`save` has written. Raises ValueError naming what is wrong."""
        return cls.from_json(read_text(path, "a plan"))

    def to_json(self) -> str:
        """One JSON object with a ``version``: every field by its name."""
        return plan_to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "ParallelPlan":
        """Reads :meth:`to_json`. Raises ValueError naming what is wrong."""
        return plan_from_json(cls, instance_of("text", text, str, "a plan as JSON text"))

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        """Pickles as JSON: all but what :meth:`explain` needs, as a plan that was saved."""
        return ParallelPlan.from_json, (self.to_json(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParallelPlan":
        return self  # nothing in it changes


def fingerprint_of(names: Sequence[str], shapes: Sequence[Sequence[int]]) -> str:
    """A fingerprint of a model: a hash of its operators' names and shapes, in order."""
    text = json.dumps([list(names), [list(shape) for shape in shapes]])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
