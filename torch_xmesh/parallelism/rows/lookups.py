"""Tables that are looked into."""

from torch_xmesh.parallelism.loops import Loops
from torch_xmesh.parallelism.rows.registry import Call, extents_of, labels_like, row


@row("embedding")
def embedding(call: Call) -> Loops:
    """The vocabulary is a loop that adds up: a device that does not have a row adds zeros."""
    indices, weight = call.tensor(0, "input"), call.tensor(1, "weight")
    batch = labels_like(indices.shape, "b")
    extents = {**extents_of(batch, indices.shape), **extents_of(("v", "j"), weight.shape)}
    return call.loops({indices.index: batch, weight.index: ("v", "j")}, (*batch, "j"), extents)
