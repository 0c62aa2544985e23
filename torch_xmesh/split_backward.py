"""A backward in two halves: input gradients now, weight gradients later."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from torch_xmesh import _C

if TYPE_CHECKING:
    from torch_xmesh._C import WeightGradients


# Second halves that nobody has run hold a graph, which would keep what a script has open beyond the interpreter's end.
atexit.register(_C.drop_weight_gradients)


def split_backward(
    outputs: torch.Tensor | Sequence[torch.Tensor],
    grads: torch.Tensor | Sequence[torch.Tensor | None] | None,
    inputs: torch.Tensor | Sequence[torch.Tensor],
) -> tuple[list[torch.Tensor | None], WeightGradients]:
    """Runs the part of a backward that ``inputs`` need, and leaves what only weights need for later.

    Together both halves do what ``torch.autograd.backward(outputs, grads)`` does, to the bit: ``run_weight_grads()``
    adds to ``.grad`` of every leaf but the inputs, and runs its hooks. Split so, a pipeline sends input gradients to
    the stage before without waiting for weight gradients (Qi et al., Zero Bubble Pipeline Parallelism, 2023,
    section 2).

    The backward ends at ``inputs``: what they were made from gets nothing. Matrix products and convolutions run twice,
    each time for other gradients; everything else that touches a weight runs once, in the first half, and its weight
    gradient is held until the second. The graph from outputs to inputs belongs to the call: no other backward may run
    through it, and ``retain_graph`` or double backward are not possible.

    Args:
        outputs: tensors that require grad, or one.
        grads: their gradients, of the same shapes; None for an output of one element.
        inputs: tensors that require grad, or one; no two the same, none computed from another. Leaves, if the graph has
            parts that cannot be split.

    Returns:
        the inputs' gradients, as ``torch.autograd.grad`` gives them (None where no output depends on one), and
        ``run_weight_grads``, to be called once, from any thread. Its ``whole_because`` is None, or says why the
        backward could not be split: it has then run as a whole, and the second half does nothing.

    Raises:
        ValueError: arguments that do not fit together.
        RuntimeError: ``run_weight_grads`` is called a second time; and whatever a backward raises.
    """
    roots, wanted = _tensors("outputs", outputs), _tensors("inputs", inputs)
    given = [grads] if grads is None or isinstance(grads, torch.Tensor) else list(grads)
    if grads is None:
        given = [None] * len(roots)
    if len(given) != len(roots):
        raise ValueError(f"grads has {len(given)} gradients, expected one for each of {len(roots)} outputs")
    gradients = [_gradient(i, output, grad) for i, (output, grad) in enumerate(zip(roots, given, strict=True))]
    return _C.split_backward(roots, gradients, wanted)


def _tensors(name: str, given: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    tensors = [given] if isinstance(given, torch.Tensor) else list(given)
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name}[{i}] is a {type(tensor).__name__}, expected a tensor")
        if not tensor.requires_grad:
            raise ValueError(f"{name}[{i}] does not require grad")
    return tensors


def _gradient(index: int, output: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor:
    if grad is None:
        if output.numel() != 1:
            raise ValueError(f"grads[{index}] is missing: outputs[{index}] has {output.numel()} elements, not one")
        if output.is_complex():
            raise ValueError(f"grads[{index}] is missing: outputs[{index}] is complex")
        return torch.ones_like(output)
    if not isinstance(grad, torch.Tensor):
        raise ValueError(f"grads[{index}] is a {type(grad).__name__}, expected a tensor or None")
    if grad.shape != output.shape:
        raise ValueError(f"grads[{index}] has shape {tuple(grad.shape)}, outputs[{index}] has {tuple(output.shape)}")
    return grad
