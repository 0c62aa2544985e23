"""The C++ rooms of torch_xmesh, as csrc/bindings exports them. Internal: the package's modules are the public face."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch._C._distributed_c10d import Backend, Store, Work
from torch.distributed.tensor import DTensor

# bind_process_group.cpp

def end_live_groups(has_failed: bool) -> None: ...
def address_towards(store: Store) -> str | None: ...

class ProcessGroupXmesh(Backend):
    """The c10d backend ``xmesh``: gloo carries cpu tensors, NCCL cuda tensors."""

    class Options(Backend.Options):
        """Options of a group on xmesh; ``gloo`` and ``nccl`` are handed to the inner backends of these names."""

        gloo: Backend.Options | None
        """``ProcessGroupGloo.Options`` for what carries cpu tensors, or None."""
        nccl: Backend.Options | None
        """``ProcessGroupNCCL.Options`` for what carries cuda tensors, or None."""
        inner: dict[str, str]
        """Which c10d backend carries a kind of accelerator, as in ``options.inner = {"xpu": "xccl"}``; assign it."""
        blocking_wait: bool
        """On an accelerator, ``wait()`` of a reshard blocks the host until the device is done."""
        staging_bytes: int
        """Most memory per rank that reshards may stage messages in, in bytes."""
        pacing: bool
        """Pace reshards' direct sends to their planned rates where rates were measured."""
        shared_memory: bool
        """Reshard between ranks at one address through shared memory where that can be had."""
        host_id: str
        """Which host this rank is on; empty for XMESH_HOST_ID or what is discovered."""
        def __init__(self, timeout: timedelta = ...) -> None: ...
        def __copy__(self) -> ProcessGroupXmesh.Options: ...
        def __deepcopy__(self, memo: object) -> ProcessGroupXmesh.Options: ...

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        options: ProcessGroupXmesh.Options,
        make_inner: Callable[[str, Store, int, int, ProcessGroupXmesh.Options], Backend],
        accelerators: Sequence[str],
    ) -> None: ...
    def carries(self, device: torch.device) -> bool:
        """Whether tensors on a device of this kind can be moved here."""
    @property
    def store(self) -> Store:
        """The store of this group's own keys."""
    @property
    def options(self) -> ProcessGroupXmesh.Options:
        """The group's live options."""
    @property
    def timeout(self) -> timedelta: ...
    @property
    def global_ranks(self) -> list[int]:
        """Global rank of every group rank; empty for the default group."""
    @property
    def is_closed(self) -> bool:
        """True after abort() or shutdown()."""
    def inner_backend(self, device: torch.device) -> Backend:
        """The inner backend that carries tensors of the device's kind, made if need be."""
    def _set_default_timeout(self, timeout: timedelta) -> None: ...
    def perform_nocolor_split(self, device: torch.device) -> None: ...

# bind_core.cpp

class TensorSpec:
    """A global shape and dtype on a mesh with one placement per axis, as text: "Shard(0)", "Partial(sum)"."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: str,
        mesh_shape: Sequence[int],
        mesh_ranks: Sequence[int],
        placements: Sequence[str],
    ) -> None:
        """``mesh_ranks``: global ranks, row-major. Raises ValueError for what does not fit."""
    @property
    def shape(self) -> list[int]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def mesh_shape(self) -> list[int]: ...
    @property
    def mesh_ranks(self) -> list[int]: ...
    @property
    def placements(self) -> list[str]: ...
    @property
    def num_bytes(self) -> int: ...
    def local_shape(self, global_rank: int) -> list[int] | None:
        """Shape of the local tensor on a global rank; None outside the mesh."""
    def __eq__(self, other: TensorSpec, /) -> bool: ...  # type: ignore[override]

class LinkModel:
    """What a byte and a message cost: rates in bytes per second each way, times in microseconds."""

    nic_bytes_per_s: int
    local_bytes_per_s: int
    latency_us: float
    message_us: float
    local_latency_us: float
    is_measured: bool
    def __init__(self) -> None: ...

class Topology:
    """Which host every rank in use lives on, and what the links carry."""

    def __init__(self, host_of: Mapping[int, int], links: LinkModel, nic_of_host: Mapping[int, int]) -> None:
        """Raises ValueError for a negative rank or host, or a rate that is not positive."""
    @property
    def host_of(self) -> dict[int, int]: ...
    @property
    def links(self) -> LinkModel: ...
    @property
    def nic_of_host(self) -> dict[int, int]: ...
    def __eq__(self, other: Topology, /) -> bool: ...  # type: ignore[override]

class ReshardingPlan:
    """An immutable plan."""

    @staticmethod
    def from_json(text: str) -> ReshardingPlan:
        """Raises ValueError naming line, column and field of what is wrong."""
    def to_json(self) -> str: ...
    def text(self, max_messages: int = 8) -> str:
        """The plan as a table for people, with its first ``max_messages`` messages."""
    def fingerprint(self) -> str:
        """32 hex digits, equal for equal plans on every CPU."""
    def lanes(self) -> list[tuple[int, int, float, float]]:
        """(host from, host to, start, end) of every message in predicted seconds."""
    def bytes_sent(self) -> dict[int, int]:
        """NIC bytes out by host."""
    def bytes_received(self) -> dict[int, int]:
        """NIC bytes in by host."""
    @property
    def participants(self) -> list[int]:
        """Ascending global ranks of either mesh."""
    @property
    def strategy(self) -> str: ...
    @property
    def topology(self) -> Topology: ...
    @property
    def lower_bound_bytes(self) -> int: ...
    @property
    def lower_bound_seconds(self) -> float: ...
    @property
    def predicted_seconds(self) -> float: ...
    @property
    def num_messages(self) -> int: ...
    @property
    def num_tasks(self) -> int: ...
    @property
    def tensors(self) -> list[tuple[TensorSpec, TensorSpec]]:
        """Source and destination per tensor."""

def plan_resharding(
    tensors: Sequence[tuple[TensorSpec, TensorSpec]], topology: Topology, strategy: str
) -> ReshardingPlan:
    """Plans source to destination of every tensor. Raises ValueError."""

def canonical_strategy(text: str) -> str:
    """The one spelling of a strategy. Raises ValueError saying which there are."""

def strategy_names() -> list[str]:
    """Every strategy but "auto"."""

# bind_reshard.cpp

class PreparedPlan:
    """What this rank does for a plan: shared by all calls with the same arguments."""

    @property
    def participants(self) -> list[int]: ...

class CallKey:
    """Names one reshard call on all its ranks."""

class ReshardGroup:
    """The reshards of one process group on one rank. One thread at a time."""

    @property
    def global_rank(self) -> int: ...
    @property
    def peak_staging_bytes(self) -> int:
        """Most staging memory that was allocated at once, in bytes."""
    @property
    def timeout(self) -> timedelta: ...
    @timeout.setter
    def timeout(self, arg1: timedelta, /) -> None: ...
    def topology(self, ranks: Sequence[int], links: LinkModel) -> Topology:
        """Hosts of global ranks as they published them. Waits for ranks not there yet; PeerError at the timeout."""
    def prepare(
        self,
        plan: ReshardingPlan,
        requires_grad: str,
        is_backward: bool,
        labels: Sequence[str] = [],
        entries: Sequence[tuple[str, str]] = [],
        devices: Sequence[tuple[str, str]] = [],
        through_host: bool = False,
    ) -> PreparedPlan:
        """``requires_grad``: one letter, 0 or 1, per tensor; ``labels``: a name per tensor, or none at all;
        ``entries``: what ranks compare besides; ``devices``: kinds of source and destination per tensor; none: cpu.
        ``through_host``: host memory carries tensors of all kinds."""
    def begin(
        self,
        prepared: PreparedPlan,
        src: Sequence[torch.Tensor],
        dst: Sequence[torch.Tensor],
        forward: CallKey | None,
        is_detached: bool,
        writes_once_agreed: bool,
    ) -> Work:
        """Starts a call on local tensors. ``forward``: whose backward this is. Nobody waits for a detached one.
        ``writes_once_agreed``: a refused call leaves ``dst`` as it is."""
    def refuse(self, participants: Sequence[int], text: str) -> None:
        """Tells the other participants that this rank's call will not come, and why."""
    def refuse_unnamed(self, ranks: Sequence[int], text: str) -> None:
        """The same where only some of the participants are known: those whose call has all of them ask back."""
    def refuse_pipeline(self, ranks: Sequence[int], text: str, is_mistake: bool) -> None:
        """Tells those that may wait for this rank that it cannot make a pipeline of ``ranks`` (none: not known):
        ValueError there, or StageError."""
    def close(self, abort: bool) -> None: ...

def reshard_group(group: ProcessGroupXmesh, global_ranks: Sequence[int]) -> ReshardGroup:
    """The reshards of a process group, made at the first call. ``global_ranks``: of its group ranks, in order."""

def shared_memory(written: Sequence[torch.Tensor], read: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Two tensors that share memory, ascending: one of ``written`` and another one, of these or, counted on, of
    ``read``; or the same twice where it shares some with itself."""

def call_key(work: Work) -> CallKey:
    """The key of the call behind a Work of :meth:`ReshardGroup.begin`. ValueError for any other Work."""

# bind_reshard_call.cpp

class NormalForm:
    """A call's arguments as they were walked."""

    @property
    def key(self) -> bytes:
        """Calls of equal keys move the same tensors the same way."""
    @property
    def leaves(self) -> list[Any]:
        """Of the tensors' container, in order: tensors, specs and what is passed through."""
    @property
    def outs(self) -> list[Any]:
        """Leaves of the container of outputs."""

class NormalForms:
    """Normal forms of the arguments of reshards."""

    def __init__(self) -> None: ...
    def of(
        self, xs: Any, dst_mesh: Any, dst_placements: Any, out: Any, options: tuple[object, ...], with_grad: bool
    ) -> NormalForm | None:
        """None for arguments that have a member of a kind that is not known here. Reads no data."""

class ResultMaker:
    """Makes the DTensors that a call fills, anew each time."""

    def __init__(self, results: Sequence[tuple[Sequence[int], torch.dtype, str, Any]]) -> None:
        """``results``: local shape, dtype, device and DTensorSpec of each."""
    def make(self) -> tuple[list[torch.Tensor], list[DTensor]]:
        """The local tensors, and the DTensors around them."""

def local_tensors(dtensors: Sequence[Any]) -> list[torch.Tensor]:
    """Local tensors with their bytes in them; an empty one for a spec."""

def rebuilt(container: Any, leaves: Sequence[Any]) -> Any:
    """The dicts, lists and tuples of ``container`` made anew around other leaves."""

# bind_pipeline_core.cpp

class Schedule:
    """Which place of a pipeline computes what in which order; immutable."""

    @property
    def name(self) -> str: ...
    @property
    def num_stages(self) -> int: ...
    @property
    def num_microbatches(self) -> int: ...
    @property
    def place_of_stage(self) -> list[int]: ...
    @property
    def num_places(self) -> int: ...
    @property
    def num_segments(self) -> list[int]:
        """By stage; 1: it is not divided."""
    def actions(self, place: int) -> list[str]:
        """A place's, as to_csv() writes them."""
    def divided(self, segments: Sequence[int]) -> Schedule:
        """The same with each action of a stage as those of its segments, one after the other; ``segments``: their
        number by stage. Raises ValueError where it is an order of others."""
    @property
    def peak_in_flight(self) -> list[int]: ...
    def to_csv(self) -> str: ...
    def validate(self, edges: Sequence[tuple[int, int, bool]], is_forward_only: bool = False) -> None:
        """``edges``: (from stage, to stage, has gradient). Raises ValueError with the bad cell marked."""
    def refuse_cell(self, place: int, cell: int, message: str) -> NoReturn:
        """Raises ValueError with the message and the cell marked."""
    def forwards(self) -> Schedule:
        """Its forward actions alone."""
    def __eq__(self, other: Schedule, /) -> bool: ...  # type: ignore[override]

def make_schedule(
    name: str, num_stages: int, num_microbatches: int, place_of_stage: Sequence[int] = ...
) -> Schedule: ...
def schedule_names() -> list[str]: ...
def schedule_from_csv(text: str, name: str = "csv") -> Schedule: ...

class ScheduleCosts:
    """What stages and transfers take and hold, for simulations."""

    def __init__(
        self,
        stages: Sequence[tuple[float, float, float, float, int, int, int, float]],
        edges: Sequence[tuple[tuple[int, int, bool], tuple[float, int], tuple[float, int], bool]],
        nic_bytes_per_s: float,
        latency_s: float,
        overlap: bool,
        blocks_receiver: bool,
        runs_weights_early: Sequence[int],
        noise: float,
        noise_seed: int,
        weights_group: Sequence[int] = ...,
        is_on_one_host: Sequence[int] = ...,
    ) -> None:
        """``stages``: seconds of F, B, I, W; bytes held from F to I, from I to W, and anyway; seconds of sums at the
        end. ``edges``: edge, forward and backward (seconds, bytes) each, whether also on one place."""

def simulate_schedule(schedule: Schedule, costs: ScheduleCosts) -> dict[str, Any]:
    """Plays a schedule.

    Returns:
        makespan_s, bubble_fraction, busy_s and peak_bytes by place, peak_in_flight by stage, actions (place, text,
        start, end), transfers (from stage, to stage, microbatch, ready, start, end, their segments); all times in
        seconds.
    """

def choose_schedule(
    costs: ScheduleCosts,
    place_of_stage: Sequence[int],
    num_microbatches: int,
    memory_limit_bytes: int | None,
    segments: Sequence[int] = ...,
) -> tuple[int, list[tuple[Schedule, float, float, bool, list[int]]]]:
    """The best candidate's index or -1; of each its schedule, seconds, mean seconds with noise, whether W runs early,
    peak bytes by place. ``segments``: by stage, of which ``costs`` are then."""

def duplex(place_of_stage: Sequence[int], num_microbatches: int, segments: Sequence[int]) -> Schedule:
    """Microbatches in pairs, which take a stage's segments in turn."""

# bind_split_backward.cpp

class WeightGradients:
    """The weights' half of a backward; runs once."""

    @property
    def whole_because(self) -> str | None:
        """Why the first half was a whole backward, if it was."""
    def __call__(self) -> None: ...

def drop_weight_gradients() -> None:
    """Drops what all split backwards hold whose second half has not run. Called at the end of the interpreter."""

def split_backward(
    outputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[list[torch.Tensor | None], WeightGradients]: ...

# bind_pipeline.cpp

class PipelineCall:
    """A transfer in flight."""

    def has_arrived(self) -> bool:
        """What it receives is there, or on its way on a stream of the device; what it sends need not be kept."""

class Link:
    """One process's end of a link between a source of weights and replicas, which find each other through a store.

    Versions move on a thread of the link's. ``PeerError`` where the own source or replica has lost a rank,
    ``RuntimeError`` once the link is closed.
    """

    def __init__(
        self,
        store: Store,
        is_source: bool,
        replica: str,
        rank: int,
        size: int,
        deadline: timedelta,
        staging_bytes: int,
        wave_bytes: int,
    ) -> None: ...
    def enter(self, manifest: str, held: Sequence[Sequence[torch.Tensor]], needed: Sequence[torch.Tensor]) -> None:
        """Joins with what this process has or needs: a manifest as JSON, and the memory behind it. Once."""
    def publish(self, version: int) -> None:
        """Brings a version, above all before it, to the replicas that are there. Until it is settled the held memory
        may not change."""
    def wait_settled(self, version: int, timeout: timedelta) -> tuple[str, list[str], list[str]] | None:
        """Why nobody was brought the version, or nothing; the replicas that hold it; those that were left out, and
        why. None when ``timeout`` (0: none) comes first."""
    def receive(self, timeout: timedelta) -> int:
        """Waits until all ranks of this replica have had a version above those of the last ``swap()``; that one, or 0
        at the timeout (0: none). All ranks then call ``swap()``."""
    def swap(self) -> int:
        """Called by all ranks of a replica alike: the version that all of them have, or 0. The next one waits for
        ``resume()``."""
    def resume(self) -> None: ...
    @property
    def has_source(self) -> bool: ...
    def close(self) -> None: ...

class StreamMark:
    """A point of a device's stream."""

class PipelineTraffic:
    """The transfers of one pipeline on one rank."""

    def __init__(self, group: ReshardGroup, ranks: Sequence[int]) -> None:
        """``ranks``: ascending global ranks of all stages. Waits until all of them use the group; raises where one is
        known not to come, and tells the others."""
    def meet(self, fields: Sequence[tuple[str, str]]) -> None:
        """Compares (field, value) with all ranks. ValueError naming what differs."""
    def begin(
        self,
        lane: str,
        count: int,
        prepared: PreparedPlan,
        src: Sequence[torch.Tensor],
        dst: Sequence[torch.Tensor],
    ) -> PipelineCall:
        """Starts transfer ``count`` of a lane, numbered alike on its ranks."""
    def wait(self, call: PipelineCall) -> None: ...
    def check(self) -> None:
        """Raises what the pipeline has failed with."""
    @property
    def has_failed(self) -> bool: ...
    def fail_stage(self, text: str, stage: int, microbatch: int) -> None:
        """Tells all ranks that a stage raised: StageError there."""
    def fail_peer(self, text: str, ranks: Sequence[int]) -> None:
        """Tells all ranks that these are to blame: PeerError there."""
    def ends_too(self, group: ProcessGroupXmesh) -> None:
        """A failure of the pipeline ends the group's collectives on this rank from now on."""
    @staticmethod
    def mark(device: torch.device) -> StreamMark:
        """Where a device's current stream is now."""
    def expect_end(self, begin: StreamMark, device: torch.device) -> None:
        """The pipeline fails where a collective, which the device's current stream has got since ``begin``, lasts for
        longer than the group's timeout."""
    def await_ends(self) -> None:
        """Waits until the device is through with these collectives. Raises what the pipeline has failed with."""
    def await_cause(self, suspects: bool) -> None:
        """Raises what the pipeline has failed with, or fails with within seconds; with ``suspects`` all ranks are asked
        what they do."""
    def begin_phase(self) -> None:
        """What follows is the next thing that all ranks do together."""
    def refuse(self, text: str) -> None:
        """Tells all ranks of a mistake: ValueError there, once they come to this rank's phase."""
    def close(self) -> None: ...

class StageValues:
    """What a stage takes and gives: values by name, which inputs the user passes, and why its backward is never split
    (empty where its graph decides). ``waits_in_weights``: in each W, or behind it, ranks wait for each other. Stages of
    one ``weights_group`` add to the same gradients."""

    def __init__(
        self,
        stage: int,
        inputs: Sequence[str],
        outputs: Sequence[str],
        model_positions: Sequence[int],
        is_alone: bool,
        whole_because: str,
        device: torch.device,
        waits_in_weights: bool = False,
        weights_group: int = 0,
    ) -> None: ...

class EdgeValues:
    """The values that go from one stage to another."""

    from_stage: int
    to_stage: int
    from_positions: Sequence[int]
    to_positions: Sequence[int]
    is_differentiable: Sequence[int]
    drops_gradient: Sequence[int]
    is_passing: bool
    is_local: bool
    has_producer: bool
    has_consumer: bool
    def __init__(self) -> None: ...

class EdgePlans:
    """The plans of one edge's transfers in a step, by microbatch."""

    def __init__(
        self,
        lane: str,
        values: str,
        is_joint: bool,
        dtypes: Sequence[torch.dtype],
        forward: Sequence[PreparedPlan],
        backward: Sequence[PreparedPlan],
    ) -> None: ...

class PipelinePlace:
    """One rank's part of a pipeline: its stages, their transfers, and the engine that runs them."""

    def __init__(
        self,
        traffic: PipelineTraffic,
        stages: Sequence[StageValues],
        edges: Sequence[EdgeValues],
        segments: Sequence[int],
        overlap: bool,
        lookahead: int,
    ) -> None:
        """``segments``: how many each of the pipeline's stages has; `stages` and `edges` are of segments then, by their
        numbers among all. Empty: none has any."""
    def run(
        self,
        forward: Callable[[int, int, list[torch.Tensor]], tuple[list[torch.Tensor], torch.Tensor | None]],
        schedule: Schedule,
        place: int,
        step: int,
        first_microbatch: int,
        edges: Sequence[EdgePlans],
        model_inputs: Mapping[int, Sequence[Sequence[torch.Tensor]]],
        has_backward: bool,
        weights_key: int,
        runs_weights_early: bool,
        is_measured: bool,
        loss_weights: Sequence[float],
        weights_done: Callable[[int, int, bool], None] | None = None,
    ) -> None:
        """Runs the place's actions once. ``forward(stage, microbatch, inputs)`` returns the outputs, and on the last
        stage the loss; it is not kept. ``model_inputs``: by stage, then microbatch; ``loss_weights``: by microbatch,
        the gradient that enters the last stage's loss; ``first_microbatch``: how many all earlier runs had;
        ``weights_done(stage, microbatch, is_last)``: called behind each B and W, not kept either."""
    @property
    def failed_action(self) -> tuple[int, int] | None:
        """(stage, microbatch) of the action that raised."""
    @property
    def failed_in(self) -> str:
        """The stage or the segment of it that raised: "stage 1, segment 14"."""
    def may_run_early(self, stage: int) -> bool:
        """Whether a W of the stage may run before its turn, where the place would wait, in a step like the last one."""
    @property
    def weight_storages(self) -> dict[int, dict[int, int]]:
        """By stage, of the last I of a measured step: the memory that waited for its W, bytes by storage."""
    @property
    def whole_because(self) -> list[tuple[int, str, str]]:
        """The stages of this rank, or segments, whose backward I and W did not split: number, name, and why."""
    @property
    def spans(self) -> list[tuple[str, str, int, int]]:
        """("compute" or "wait", action, begin, end) in nanoseconds; an action is "1F3", or "1F3, segment 14"."""
    @property
    def transfers(self) -> list[tuple[bool, int, int, bool, int, int]]:
        """(is a send, edge, microbatch, is gradient, begin, end) in nanoseconds."""
    @property
    def num_buffers(self) -> int: ...
    @property
    def buffer_bytes(self) -> int: ...

# bind_about.cpp

def cuda_kernels() -> tuple[str | None, str | None]:
    """What the own CUDA kernels were compiled for ("sm_80, sm_90"; None without them), and why they are not used here
    (None where nothing is known against it)."""

def device_communicators() -> tuple[int, int]:
    """How many communicators of the library's own live in this process, and by how many bytes the devices' free memory
    fell while they were made (0 where a device does not say)."""

def collective_cost_models() -> list[tuple[str, str]]:
    """Names and summaries of all cost models of collectives."""

_Axis = tuple[int, float, float] | tuple[int, float, float, float]

def collective_cost(model: str, collective: str, num_bytes: float, axis: _Axis) -> float:
    """Seconds of one collective along an axis (size, latency, seconds per byte, and, if that is more, the same where
    all send to all). Raises ValueError for names that are unknown."""

class ConversionCosts:
    """What it costs to bring a value from one state on a mesh to another."""

    def __init__(
        self,
        shape: Sequence[int],
        num_bytes: float,
        axes: Sequence[_Axis],
        model: str,
        is_direct: bool = False,
    ) -> None:
        """For a value of this shape and so many bytes; axes as in collective_cost. A state has per axis a dim, -1
        (replicated) or -2 (a partial sum). `is_direct`: axis by axis, not by way of other shardings. Raises ValueError
        for a mesh of more than 3 axes and an unknown model."""
    def cost(self, from_state: Sequence[int], to_state: Sequence[int]) -> float: ...
    def steps(
        self, from_state: Sequence[int], to_state: Sequence[int]
    ) -> list[tuple[int, list[int], str | None, float]]:
        """(axis, state afterwards, collective or None, bytes) of the cheapest way, in order."""

class CostTable:
    """What each pair of choices of two nodes costs."""

    def __init__(self, num_rows: int, num_columns: int, costs: Sequence[float]) -> None:
        """Raises ValueError for another number of costs."""
    def at(self, row: int, column: int) -> float: ...

def conversion_table(
    costs: ConversionCosts,
    made: Sequence[tuple[Sequence[int], Sequence[int]]],
    taken: Sequence[tuple[Sequence[int], Sequence[int]]],
    has_gradient: bool,
    times: int = 1,
) -> CostTable:
    """Between the choices of who makes a value and of who takes it: pairs of the value's state and the gradient's. The
    value goes that way `times` times, its gradient back once."""

_End = tuple[Sequence[int], Sequence[int]]
_Moves = Sequence[tuple[int, int, int]]
_Read = tuple[int, _End, _Moves, _Moves, bool]
_Result = tuple[int, _End, _Moves, _Moves]
_DimLoops = Sequence[Sequence[int]]
_LoopNest = tuple[Sequence[str], Sequence[int], Sequence[_DimLoops], Sequence[_DimLoops], bool, Sequence[int]]

class Program:
    """What the devices of a stage do with a microbatch, as data. A state has per axis a dim, -1 (replicated) or -2 (a
    partial sum); an end is a value's and its gradient's; a move is an axis with its state before and after."""

    def __init__(self, mesh_shape: Sequence[int]) -> None: ...
    def add_value(self, name: str, shape: Sequence[int], held: _End, *, has_gradient: bool, enters: bool) -> int:
        """Its number. `held`: how readers find it. `enters`: it is there from the beginning."""
    def add_operator(
        self, name: str, loops: _LoopNest, axes: Sequence[int], reads: Sequence[_Read], results: Sequence[_Result]
    ) -> None:
        """`loops`: names, extents, by input and by output the loops over each dim, whether it is linear, inputs that
        are added once. `axes`: by mesh axis a loop's number, -1 (whole), -2 (partial sums pass) or -3 (those of
        gradients do). Reads: (value, taken, moves there, moves of the gradient back, gives a gradient); results:
        (value, made, moves to where it is held, moves of the gradient back)."""
    def add_fetch(self, value: int, kept: Sequence[int], there: _Moves, back: _Moves) -> None:
        """A parameter as it is kept between steps, with the moves to where readers find it, its gradient's back."""
    def add_leaving(self, read: _Read) -> None: ...
    def validate(self) -> None:
        """Raises ValueError that names the operator and the value that do not fit."""
    def is_transfer(self, operator: int | None, place: int, *, is_result: bool = False) -> bool:
        """Whether an operator's read or result of that place, or, without an operator, what leaves, comes by a
        transfer: a conversion among devices that leaves nobody summands."""
    def segments(self, may_begin: Sequence[bool]) -> list[int]:
        """The operators with which segments begin: what is computed between two transfers. `may_begin`: by operator."""

class StrategyGraph:
    """Sharding choices of operators, and what they cost alone and in pairs."""

    def __init__(self) -> None: ...
    def add_node(self, name: str, costs: Sequence[float]) -> int:
        """Its number. Raises ValueError without a choice."""
    def add_edge(self, from_node: int, to_node: int, table: CostTable) -> None:
        """Raises ValueError where the table does not fit."""
    def set_costs(self, costs: npt.NDArray[np.float64]) -> None:
        """Other costs of all nodes, on end. Raises ValueError for another number of them."""
    def edge_costs(self, choices: Sequence[int]) -> list[float]:
        """What each edge costs, with one choice per node."""
    def cost(self, choices: Sequence[int]) -> float:
        """What one choice per node costs."""
    def least_cost(self) -> tuple[list[int], float, bool]:
        """The choices that cost least together, their cost, and whether nothing costs less. Raises ValueError where
        there are none."""

_SubmeshPart = tuple[int, int, int]
_ChosenStage = tuple[int, int, int, int]

def cluster_operators(
    operators: Sequence[tuple[int, Sequence[int]]],
    values: Sequence[tuple[int | None, int]],
    num_layers: int,
    slack: float,
) -> tuple[list[int], int, int]:
    """Operators (FLOPs, values that they read) and values (maker or None, bytes) cut into layers: (first operator of
    each, most bytes that one receives, FLOPs that none exceeds). Raises ValueError for fewer operators than layers."""

def submesh_shapes(
    classes: Sequence[tuple[int, int]], powers_of_two: bool = False, is_mixed: bool = False
) -> list[list[_SubmeshPart]]:
    """The shapes that stages may have on hosts of these classes (hosts, devices of each): lists of parts (class, hosts,
    devices of each)."""

def place_submeshes(
    classes: Sequence[tuple[int, int]], submeshes: Sequence[Sequence[_SubmeshPart]]
) -> list[list[tuple[int, int, int, int]]] | None:
    """The devices of each submesh: (class, host within it, first device, devices). None where they cannot be placed."""

class StageProblem:
    """Layers to cut into stages, and what each would take on each submesh."""

    def __init__(
        self,
        num_layers: int,
        num_microbatches: int,
        num_devices: Sequence[int],
        submeshes: Sequence[tuple[Sequence[int], int]],
        in_flight: Sequence[int],
    ) -> None:
        """`num_devices` by class; a submesh is (devices of each class, bytes of a device); `in_flight` says how many
        microbatches a stage holds, by the number of stages behind it."""
    def add_options(
        self,
        submesh: int,
        seconds: Sequence[float],
        stage_bytes: Sequence[int],
        bytes_per_microbatch: Sequence[int],
    ) -> None:
        """One more way to run each stretch of layers: lists by first and last layer."""
    def set_entering(self, submesh: int, seconds: Sequence[float]) -> None:
        """What the values that a stage reads, and their gradients, take on their way, by its first layer."""
    def best_plans(
        self,
        count: int,
        accepts: Callable[[list[_ChosenStage]], bool] | None = None,
        go_on: Callable[[], bool] | None = None,
        num_stages: int | None = None,
    ) -> list[tuple[float, bool, list[_ChosenStage]]]:
        """The cheapest ones, of any number of stages or of this one: (seconds, whether that is proven, stages (first
        layer, end, submesh, option))."""
    def smallest_memory(self) -> tuple[int, list[_ChosenStage], int] | None:
        """The least bytes of a device that leave a plan, its stages, and which of them needs so much."""
