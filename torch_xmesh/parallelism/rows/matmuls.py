"""Matrix products: loops over the output's elements, and one that adds up."""

from torch_xmesh.parallelism.loops import Labels, Loops
from torch_xmesh.parallelism.rows.registry import Call, Tensor, extents_of, labels_like, row


@row("linear")
def linear(call: Call) -> Loops:
    x, weight = call.tensor(0, "input"), call.tensor(1, "weight")
    bias = call.get(2, "bias")
    batch = labels_like(x.shape[:-1], "b")
    inputs: dict[int, Labels] = {x.index: (*batch, "k"), weight.index: ("j", "k")}
    if isinstance(bias, Tensor):
        inputs[bias.index] = ("j",)
    extents = {**extents_of((*batch, "k"), x.shape), **extents_of(("j", "k"), weight.shape)}
    return call.loops(inputs, (*batch, "j"), extents, is_heavy=True)


@row("matmul", "bmm", "__matmul__")
def matmul(call: Call) -> Loops:
    """Of matrices and of batches of them, which broadcast."""
    a, b = call.tensor(0, "input"), call.tensor(1, "other")
    if len(a.shape) < 2 or len(b.shape) < 2:
        raise ValueError("matmul of a vector")
    batch = labels_like(call.shape[:-2], "b")
    extents = extents_of(batch, call.shape[:-2])

    def labels_of(tensor: Tensor, last: tuple[str, str]) -> Labels:
        offset = len(batch) - (len(tensor.shape) - 2)
        own = tuple(
            batch[offset + dim] if extent == call.shape[offset + dim] else None
            for dim, extent in enumerate(tensor.shape[:-2])
        )
        extents.update(extents_of(last, tensor.shape[-2:]))
        return (*own, *last)

    inputs = {a.index: labels_of(a, ("i", "k")), b.index: labels_of(b, ("k", "j"))}
    return call.loops(inputs, (*batch, "i", "j"), extents, is_heavy=True)
