"""What plans are priced by, as tables: collectives on a cluster's meshes, and operators on one device."""

from collections import Counter

from torch_xmesh import _C
from torch_xmesh.parallelism.assembly import Subject
from torch_xmesh.parallelism.cluster import logical_shapes
from torch_xmesh.parallelism.compute import ComputeSeconds
from torch_xmesh.parallelism.loops import COLLECTIVES, whole_choice
from torch_xmesh.parallelism.plan_text import bytes_text, seconds_text

_SIZES = (4 << 10, 1 << 20, 64 << 20)


def collective_table(subject: Subject) -> str:
    """A line for each collective along each axis of the meshes that all devices together are looked at as; the bytes
    are those of the whole value."""
    cluster = subject.cluster
    ranks = [rank for host in cluster.hosts for rank in host.ranks]
    sizes = "".join(f"{bytes_text(size):>12}" for size in _SIZES)
    lines = [f"collectives as {subject.collectives}'s", f"{'mesh':10} {'axis':>4} {'collective':16}{sizes}"]
    for shape in logical_shapes(len(cluster.hosts), len(ranks) // len(cluster.hosts)):
        for axis, links in enumerate(cluster.links(ranks, shape)):
            for collective in COLLECTIVES:
                costs = (_C.collective_cost(subject.collectives, collective, float(size), links) for size in _SIZES)
                mesh = " x ".join(map(str, shape))
                lines.append(
                    f"{mesh:10} {axis:4d} {collective:16}" + "".join(f"{seconds_text(cost):>12}" for cost in costs)
                )
    return "\n".join(lines)


def compute_table(subject: Subject) -> str:
    """A line for each distinct operator, whole, on a device of the first host."""
    compute = subject.cluster.hosts[0].kind.compute
    counted: Counter[tuple[str, str, float, ComputeSeconds]] = Counter()
    for operator in subject.layers.forward.operators:
        seconds = compute.of_operator(operator, whole_choice(operator.loops, 1), (1,))
        shape = " x ".join(map(str, operator.makes[0].shape))
        counted[operator.kind, shape, operator.loops.flops, seconds] += 1
    lines = [
        f"operators {compute.describe()}",
        f"{'count':>5} {'operator':24} {'makes':20} {'FLOPs':>10} {'forward':>10} {'inputs':>10} {'weights':>10}",
    ]
    for (kind, shape, flops, seconds), count in counted.items():
        parts = (seconds.forward, seconds.backward_input, seconds.backward_weight)
        spent = " ".join(f"{seconds_text(part):>10}" for part in parts)
        lines.append(f"{count:5d} {kind:24} {shape:20} {flops:10.3g} {spent}")
    return "\n".join(lines)
