"""What a device holds: parameters with all that belongs to them, and what backward needs of a microbatch."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence

from torch_xmesh.parallelism.loops import Choice, State, num_parts
from torch_xmesh.parallelism.operators import Again, Operator, Value

STATES = 2
"""Optimizer states of a parameter, each as large: Adam's."""

_KEEP_WHAT_THEY_MAKE = frozenset(
    "relu relu_ relu6 tanh sigmoid hardsigmoid exp exp2 sqrt rsqrt reciprocal softmax log_softmax dropout dropout_ "
    "logsumexp norm".split()
)
_KEEP_BOTH = frozenset("scaled_dot_product_attention max_pool1d max_pool2d".split())
_KEEP_NOTHING = frozenset(
    "add sub subtract __add__ __radd__ __sub__ __rsub__ add_ sub_ iadd __iadd__ neg to float double half bfloat16 "
    "type_as sum mean expand cat stack pad gather index_select __getitem__ getitem unbind chunk split where "
    "masked_fill masked_fill_ repeat_interleave tril triu roll flip clone contiguous __setitem__".split()
)
_KEEP_A_MASK = frozenset("masked_fill masked_fill_ where gather index_select".split())
"""Kinds of operators whose backward keeps masks or indices only. These are not counted as memory, but a checkpoint
computes them anew."""
_READ_NO_BIAS = frozenset("batch_norm group_norm instance_norm".split())
_NORMS = frozenset("layer_norm group_norm rms_norm batch_norm instance_norm".split())


@dataclasses.dataclass(frozen=True)
class Bytes:
    """What a device holds.

    Attributes:
        parameters: bytes of parameters and buffers.
        gradients: bytes of the parameters' gradients.
        states: bytes of the optimizer's states.
        per_microbatch: what backward keeps, of each microbatch in flight.
        again: what the backward of one microbatch holds while it computes an activation checkpoint anew: the largest.
            What operators behind the checkpoint have kept, and is gone by then, is not subtracted.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    states: float = 0.0
    per_microbatch: float = 0.0
    again: float = 0.0

    @property
    def fixed(self) -> float:
        """However many microbatches are in flight."""
        return self.parameters + self.gradients + self.states + self.again

    def total(self, in_flight: int) -> float:
        """With so many microbatches."""
        return self.fixed + in_flight * self.per_microbatch

    def __add__(self, other: "Bytes") -> "Bytes":
        return Bytes(
            self.parameters + other.parameters,
            self.gradients + other.gradients,
            self.states + other.states,
            self.per_microbatch + other.per_microbatch,
            self.again + other.again,
        )


@dataclasses.dataclass(frozen=True)
class Kept:
    """A tensor that backward needs, where it is read or made.

    Attributes:
        operator: which needs it, by its place among the operators.
        place: position of the tensor among what the operator reads or, if it `is_made`, makes.
        memory: the value whose memory it is; views of one are kept once.
    """

    operator: int
    place: int
    is_made: bool
    value: Value
    memory: Value

    def state(self, choice: Choice) -> State:
        """How a device holds it, with the operator's choice."""
        return (choice.outputs if self.is_made else choice.inputs)[self.place].value


def kept_by(operators: Sequence[Operator], leaving: Collection[Value] = ()) -> list[Kept]:
    """What backward needs of these operators' tensors, and what they make for others, which is there until its gradient
    comes; parameters are there anyway."""
    out: list[Kept] = []
    checkpoint_of = _checkpoints(operators)
    root = _memories(operators)
    for number, operator in enumerate(operators):
        reads, makes = _needs(operator)
        if operator.checkpoint is not None:  # what it reads of the inside is made anew
            reads = [i for i, value in enumerate(operator.reads) if checkpoint_of.get(value) != operator.checkpoint]
            makes = ()
        makes = [place for place, value in enumerate(operator.makes) if place in makes or value in leaving]
        out += _kept(number, operator, reads, makes, root)
    return out


def kept_again_by(operators: Sequence[Operator]) -> list[Kept]:
    """What backward needs of what it computes anew: of a checkpoint's operators, what is made inside."""
    checkpoint_of = _checkpoints(operators)
    root = _memories(operators)
    out: list[Kept] = []
    for number, operator in enumerate(operators):
        if operator.checkpoint is not None:
            found = _kept(number, operator, *_needs(operator), root)
            out += [kept for kept in found if checkpoint_of.get(kept.memory) == operator.checkpoint]
    return out


def kept_views_of(operators: Sequence[Operator]) -> frozenset[Value]:
    """Parameters of which operators keep views that others have made: whole, as long as there is something to keep.
    What is made inside of an operator's own checkpoint is not kept."""
    root, checkpoint_of = _memories(operators), _checkpoints(operators)
    out: set[Value] = set()
    for operator in operators:
        for value in (operator.reads[place] for place in _needs(operator)[0]):
            is_inside = operator.checkpoint is not None and checkpoint_of.get(value) == operator.checkpoint
            memory = root.get(value, value)
            if memory.is_parameter and memory != value and not is_inside:
                out.add(memory)
    return frozenset(out)


def _checkpoints(operators: Sequence[Operator]) -> dict[Value, int | None]:
    """In which each value is made."""
    return {value: operator.checkpoint for operator in operators for value in operator.makes}


def _memories(operators: Sequence[Operator]) -> dict[Value, Value]:
    """By value the one whose memory it is."""
    root: dict[Value, Value] = {}
    for operator in operators:
        for value in operator.makes:
            root[value] = root.get(operator.reads[0], operator.reads[0]) if operator.views and operator.reads else value
    return root


def _kept(
    number: int, operator: Operator, reads: Sequence[int], makes: Sequence[int], root: Mapping[Value, Value]
) -> list[Kept]:
    """What backward keeps of the tensors that an operator reads and makes at these places. Parameters are left out:
    they are in memory anyway."""
    wanted = [(place, False, operator.reads[place]) for place in reads]
    wanted += [(place, True, operator.makes[place]) for place in makes]
    found = [Kept(number, place, is_made, value, root.get(value, value)) for place, is_made, value in wanted]
    return [kept for kept in found if not kept.memory.is_parameter]


def with_checkpoints(operators: Sequence[Operator], checkpoints: Sequence[int | None]) -> tuple[Operator, ...]:
    """The same, each in the checkpoint of that number. Backward computes one once more up to its last operator that
    keeps something, which it only gives its tensors (T. Chen et al., Training Deep Nets with Sublinear Memory Cost,
    2016)."""
    last: dict[int, int] = {}
    for number, (operator, checkpoint) in enumerate(zip(operators, checkpoints, strict=True)):
        is_kept = any(_needs(operator)) or (operator.kind in _KEEP_A_MASK and operator.requires_grad)
        if checkpoint is not None and is_kept:
            last[checkpoint] = number
    out = []
    for number, (operator, checkpoint) in enumerate(zip(operators, checkpoints, strict=True)):
        if checkpoint is not None:
            end = last.get(checkpoint, -1)
            again: Again = "all" if number < end else "given" if number == end else "nothing"
            operator = dataclasses.replace(operator, checkpoint=checkpoint, again=again)
        out.append(operator)
    return tuple(out)


def is_read_back(operator: Operator, place: int) -> bool:
    """Whether its backward reads again a parameter that it reads at this place. A layer norm's takes its bias along, a
    convolution's its weights, also where its input needs no gradient."""
    if operator.is_given_again:
        return True
    if operator.kind == "embedding":  # the gradient's rows follow from the indices
        return False
    if operator.kind.startswith("conv") and len(operator.reads[place].shape) > 1:
        return operator.requires_grad
    trained = [i for i, value in enumerate(operator.reads) if value.is_trained]
    if operator.kind in _READ_NO_BIAS and len(trained) == 2 and place == trained[1]:
        return False
    return place in _needs(operator)[0] or (operator.kind in _NORMS and operator.requires_grad)


def _needs(operator: Operator) -> tuple[Sequence[int], Sequence[int]]:
    """Places of what its backward needs, among what it reads and what it makes."""
    if not operator.requires_grad or operator.kind in _KEEP_NOTHING:
        return (), ()
    if operator.loops.is_linear and not operator.loops.is_heavy:
        return (), ()
    makes = [place for place, value in enumerate(operator.makes) if value.dtype.is_floating_point]
    if operator.kind in _KEEP_WHAT_THEY_MAKE:
        return (), makes[:1]
    reads = [place for place, value in enumerate(operator.reads) if _is_needed(operator, place, value)]
    return reads, makes[:1] if operator.kind in _KEEP_BOTH else ()


def _is_needed(operator: Operator, place: int, value: Value) -> bool:
    """Whether backward needs what the operator reads at this place. A product's factor is needed for the gradients of
    the other factors; what is only added (`once`) is not needed. An operator's only operand is always taken as needed,
    and so are indices and masks."""
    factors = (other for other in range(len(operator.reads)) if other != place and other not in operator.loops.once)
    if len(operator.reads) == 1 or not value.dtype.is_floating_point:
        return True
    return place not in operator.loops.once and (
        not operator.loops.is_heavy or any(operator.reads[other].requires_grad for other in factors)
    )


def fixed_bytes(value: Value, state: State, mesh_shape: Sequence[int]) -> float:
    """Bytes of a parameter on a device, with its gradient and the optimizer's states if it is trained."""
    return value.num_bytes / num_parts(state, mesh_shape) * (2 + STATES if value.is_trained else 1)
