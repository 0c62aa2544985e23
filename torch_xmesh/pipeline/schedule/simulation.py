"""What a schedule costs: an event simulator of stages and NICs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from torch_xmesh import _C
from torch_xmesh.arguments import instance_of
from torch_xmesh.pipeline.schedule.schedule import Edge, Schedule, chain_edges
from torch_xmesh.pipeline.schedule.simulation_plot import plot_simulation


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """What one microbatch takes and holds on one stage.

    Args:
        forward_seconds: time of a forward (F).
        backward_input_seconds: time of the input gradients (I), where the backward is split.
        backward_weight_seconds: time of the weight gradients (W), where the backward is split.
        backward_seconds: time of a whole backward (B); None: I plus W.
        activation_bytes: held from F until the end of B or I: received values and what autograd keeps.
        weight_bytes: held from I until the end of W; None: as many as `activation_bytes`.
        fixed_bytes: held at all times: parameters, optimizer states, buffers for values to come.
        sums_seconds: once a step, behind the last B or W: gradients are summed among the stage's devices, over their
            links.
    """

    forward_seconds: float
    backward_input_seconds: float = 0.0
    backward_weight_seconds: float = 0.0
    backward_seconds: float | None = None
    activation_bytes: int = 0
    weight_bytes: int | None = None
    fixed_bytes: int = 0
    sums_seconds: float = 0.0

    def _row(self) -> tuple[float, float, float, float, int, int, int, float]:
        split = self.backward_input_seconds + self.backward_weight_seconds
        full = split if self.backward_seconds is None else self.backward_seconds
        held = self.activation_bytes if self.weight_bytes is None else self.weight_bytes
        seconds = self.forward_seconds, full, self.backward_input_seconds, self.backward_weight_seconds
        return *seconds, self.activation_bytes, held, self.fixed_bytes, self.sums_seconds


@dataclass(frozen=True, kw_only=True)
class EdgeCosts:
    """How long one microbatch's values hold the NICs on their way between two stages.

    Args:
        forward_seconds: time of the values, for example a reshard plan's ``predicted_seconds``.
        backward_seconds: time of their gradients; None: as `forward_seconds`.
        forward_bytes: bytes of the values; they add their time at ``Costs.nic_bytes_per_s`` to `forward_seconds`.
        backward_bytes: bytes of the gradients, likewise; None: as `forward_bytes`.
        has_gradient: False where no gradient comes back.
        is_resharded: where both stages are on one place: True where the values lie otherwise for the later one, and are
            on their way among the place's devices, over their links; False: they are handed over at once.
    """

    forward_seconds: float = 0.0
    backward_seconds: float | None = None
    forward_bytes: int = 0
    backward_bytes: int | None = None
    has_gradient: bool = True
    is_resharded: bool = False

    def _row(self, edge: Edge) -> tuple[tuple[int, int, bool], tuple[float, int], tuple[float, int], bool]:
        seconds = self.forward_seconds if self.backward_seconds is None else self.backward_seconds
        num_bytes = self.forward_bytes if self.backward_bytes is None else self.backward_bytes
        ways = (self.forward_seconds, self.forward_bytes), (seconds, num_bytes)
        return (*edge, self.has_gradient), *ways, self.is_resharded


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What :func:`simulate` is given.

    Args:
        stages: one per stage; for an order of segments one per segment, counted through all stages.
        edges: (earlier stage, later stage) to costs, for every edge, skip connections too; a number is seconds each
            way. By default the chain of stages, at no cost.
        nic_bytes_per_s: bytes per second of each place, one way; needed where an edge has bytes.
        latency_seconds: from the last byte sent until the value can be used.
        overlap: False: after an action its place computes on only when what it made has left.
        blocks_receiver: without overlap, a value also holds its receiver's computation, as in torch's 1F1B; with False
            it may come while the receiver computes, as in ``PipelineEngine(overlap=False)``.
        early_weights: stages that, before they wait for a value, run the next W of their list; True: all.
        weights_groups: one number per stage: those of one number add to the same gradients, so that their B and W keep
            the list's order. None: all stages of a place do.
        on_one_host: stages whose place's devices are on one host: what goes among them (`is_resharded`, sums) has links
            of its own, and does not load the host's network interface.
        noise: every action and transfer takes up to this part longer or shorter, by chance (0.05: 5 %).
        noise_seed: seed of these random changes.
    """

    stages: Sequence[StageCosts]
    edges: Mapping[Edge, EdgeCosts | float] | None = None
    nic_bytes_per_s: float | None = None
    latency_seconds: float = 0.0
    overlap: bool = True
    blocks_receiver: bool = True
    early_weights: Collection[int] | bool = False
    weights_groups: Sequence[int] | None = None
    on_one_host: Collection[int] = ()
    noise: float = 0.0
    noise_seed: int = 0

    def core(self) -> "_C.ScheduleCosts":
        """The same for C++."""
        num_stages = len(self.stages)
        edges = dict.fromkeys(chain_edges(num_stages), 0.0) if self.edges is None else self.edges
        rows = [
            (cost if isinstance(cost, EdgeCosts) else EdgeCosts(forward_seconds=float(cost)))._row(edge)
            for edge, cost in edges.items()
        ]
        early = self.early_weights
        early = range(num_stages) if early is True else () if early is False else early
        return _C.ScheduleCosts(
            [stage._row() for stage in self.stages],
            rows,
            nic_bytes_per_s=self.nic_bytes_per_s or 0.0,
            latency_s=self.latency_seconds,
            overlap=self.overlap,
            blocks_receiver=self.blocks_receiver,
            runs_weights_early=[int(stage in early) for stage in range(num_stages)],
            noise=self.noise,
            noise_seed=self.noise_seed,
            weights_group=list(self.weights_groups or ()),
            is_on_one_host=[int(stage in self.on_one_host) for stage in range(num_stages)] if self.on_one_host else [],
        )

    @classmethod
    def uniform(
        cls, num_stages: int, *, stage: StageCosts, edge: EdgeCosts | float = 0.0, overlap: bool = True
    ) -> "Costs":
        """A chain of equal stages: stage k to stage k + 1, nothing else.

        Args:
            num_stages: positive.
            stage: costs of each stage.
            edge: costs of each edge; a number is seconds each way.
            overlap: as in the constructor.
        """
        return cls(stages=[stage] * num_stages, edges=dict.fromkeys(chain_edges(num_stages), edge), overlap=overlap)


class ActionSpan(NamedTuple):
    """An action in time, seconds from the step's start; `action` as ``Schedule.actions`` spells it ("2F0")."""

    place: int
    action: str
    start_seconds: float
    end_seconds: float


class TransferSpan(NamedTuple):
    """A value's way between stages of different places, or between segments of a stage, seconds from the step's start:
    when it was made, when it left, when it was there. A gradient goes from a later to an earlier one. `microbatch`: -1
    where gradients of a step are summed; `segments`: the stages' segments between which it goes."""

    from_stage: int
    to_stage: int
    microbatch: int
    ready_seconds: float
    start_seconds: float
    end_seconds: float
    segments: tuple[int, int] = (0, 0)


class Simulation:
    """What :func:`simulate` found.

    Attributes:
        schedule: what was played.
        makespan_seconds: until the last action's end.
        bubble_fraction: 1 minus busy seconds of all places over places times makespan.
        busy_seconds: by place, seconds of computation.
        peak_in_flight: by stage, the most microbatches whose activations are held at once.
        peak_bytes: by place, the most bytes held at once, as the costs say.
        actions: an :class:`ActionSpan` for each action, by start.
        transfers: a :class:`TransferSpan` for each value and gradient, by start.
    """

    def __init__(self, schedule: Schedule, result: dict[str, Any]) -> None:
        self.schedule = schedule
        self.makespan_seconds: float = result["makespan_s"]
        self.bubble_fraction: float = result["bubble_fraction"]
        self.busy_seconds: list[float] = result["busy_s"]
        self.peak_in_flight: list[int] = result["peak_in_flight"]
        self.peak_bytes: list[int] = result["peak_bytes"]
        self.actions = [ActionSpan(*span) for span in result["actions"]]
        self.transfers = [TransferSpan(*span) for span in result["transfers"]]

    def plot(self, path: str | Path) -> None:
        """Draws the places' computation and NICs over time into an image file (format by suffix).

        Raises:
            ImportError: matplotlib is not installed.
        """
        title = (
            f"{self.schedule.name}: {self.makespan_seconds:.4g} s, {100 * self.bubble_fraction:.1f} % idle, "
            f"in flight {self.peak_in_flight}"
        )
        plot_simulation(self.schedule, self.actions, self.transfers, title=title, path=Path(path))

    def __repr__(self) -> str:
        return (
            f"Simulation({self.schedule.name!r}, makespan_seconds={self.makespan_seconds:.6g}, "
            f"bubble_fraction={self.bubble_fraction:.4f}, peak_in_flight={self.peak_in_flight})"
        )


def simulate(schedule: Schedule, costs: Costs) -> Simulation:
    """Plays a schedule: places run their actions in order, values cross full-duplex NICs, one per place. Between two
    places they follow one another; flows of different pairs share the NICs max-min fairly, as TCP's do.

    Args:
        schedule: valid for the edges of ``costs``; one without any backward is played as an evaluation.
        costs: seconds and bytes of stages and edges.

    Returns:
        when each action and transfer begins and ends, and what places hold at most.

    Raises:
        ValueError: costs that do not fit the schedule or are negative, or a schedule that cannot run, with the bad cell
            marked.
    """
    instance_of("schedule", schedule, Schedule, "an xm.Schedule")
    instance_of("costs", costs, Costs, "xm.Costs")
    return Simulation(schedule, _C.simulate_schedule(schedule.core, costs.core()))
