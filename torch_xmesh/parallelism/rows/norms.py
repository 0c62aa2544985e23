"""What needs whole rows: normalizations and softmax shard every other dim."""

from torch_xmesh.parallelism.loops import Labels, Loops
from torch_xmesh.parallelism.rows.registry import Call, Tensor, extents_of, labels_like, row


@row("layer_norm", "rms_norm")
def layer_norm(call: Call) -> Loops:
    x = call.tensor(0, "input")
    shape = call.get(1, "normalized_shape")
    num_whole = 1 if isinstance(shape, int) else len(shape)
    labels = (*labels_like(x.shape)[: len(x.shape) - num_whole], *[None] * num_whole)
    whole: Labels = (None,) * num_whole
    inputs = {x.index: labels}
    for value in (call.get(2, "weight"), call.get(3, "bias")):
        if isinstance(value, Tensor):
            inputs[value.index] = whole
    return call.loops(inputs, labels, extents_of(labels, x.shape))


@row("softmax", "log_softmax")
def softmax(call: Call) -> Loops:
    x = call.tensor(0, "input")
    dim = call.get(1, "dim")
    if not x.shape or not isinstance(dim, int):
        raise ValueError("softmax over no dim that is named")
    labels = list(labels_like(x.shape))
    labels[dim] = None
    return call.loops({x.index: tuple(labels)}, tuple(labels), extents_of(tuple(labels), x.shape))
