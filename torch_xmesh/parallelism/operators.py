"""Operators that read and make tensors: what the search looks at."""

import dataclasses
import functools
from typing import Literal

import torch
from torch import fx

from torch_xmesh.parallelism.loops import Loops
from torch_xmesh.parallelism.rows.registry import CallForm
from torch_xmesh.pipeline.capture.recording import Recording


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor that flows: a parameter or a buffer of the model, an argument, or what an operator makes.

    Attributes:
        maker: the operator's number; None for what is there from the beginning.
        is_parameter: it is a parameter or a buffer of the model.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    maker: int | None = None
    is_parameter: bool = False

    @functools.cached_property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def is_trained(self) -> bool:
        """A parameter whose gradient is wanted."""
        return self.is_parameter and self.requires_grad


Again = Literal["nothing", "given", "all"]
"""What backward does once more of an operator in a checkpoint: it is given its tensors; it is computed, too."""


@dataclasses.dataclass(frozen=True)
class Operator:
    """One operator of a forward.

    Attributes:
        name: the innermost module's that it is in, and the operator's own; unique.
        kind: the operator's own name.
        module: the innermost module that it is in; empty in the model itself.
        reads: the tensors, in the order of those of `loops.inputs` that are read.
        makes: one tensor, or several of the same loops.
        is_known: it has a row; else every device does all of it.
        is_constant: no parameter, no matrix product and no random number is behind what it makes: every device does all
            of it, and parts of that are taken as they are needed.
        draws: it draws random numbers.
        views: what it makes is the memory of the first tensor that it reads.
        checkpoint: the number of the activation checkpoint that it is in.
        again: what of it backward does once more, in a checkpoint.
        call: with the arguments that are no tensors; None of a module, and of what is in another mode than the model.
    """

    name: str
    kind: str
    module: str
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]
    loops: Loops
    is_known: bool
    is_constant: bool = False
    draws: bool = False
    views: bool = False
    checkpoint: int | None = None
    again: "Again" = "nothing"
    call: "CallForm | None" = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def requires_grad(self) -> bool:
        return any(value.requires_grad for value in self.makes)

    @property
    def is_given_again(self) -> bool:
        """Whether backward brings it its tensors once more."""
        return self.again != "nothing"

    @property
    def is_computed_again(self) -> bool:
        """Whether backward computes it once more, and leaves what it makes as before."""
        return self.again == "all"


@dataclasses.dataclass(frozen=True)
class Forward:
    """What a model does: operators in the order in which they ran, and the tensors that it returns.

    Attributes:
        parameters: all that are trained, also those that the forward does not read.
        num_samples: samples of the example, where the outputs go to a loss that each device computes of its samples.
            Outputs whose first dim is as long may be left sharded along it, others are left whole. None: outputs may
            be left in any way.
    """

    operators: tuple[Operator, ...]
    outputs: tuple[Value, ...]
    parameters: tuple[Value, ...] = ()
    num_samples: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Site:
    """Where an operator is called.

    Attributes:
        sources: the tensors among its arguments, in order, also those of which it reads the shape alone.
        is_read: for each of them, whether its values are read.
        places: nodes of the tensors that it makes.
    """

    node: fx.Node
    sources: tuple[Value, ...]
    is_read: tuple[bool, ...]
    places: tuple[fx.Node, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Recorded:
    """A forward with the graph that it was found in.

    Attributes:
        sites: by operator.
        values: by node, what it is in the end.
        given: values of placeholders and of what the model holds, by node. Parameters of modules that are called as one
            are under nodes that are not the graph's.
    """

    forward: Forward
    recording: Recording
    sites: tuple[Site, ...]
    values: dict[fx.Node, Value]
    given: dict[fx.Node, Value]
