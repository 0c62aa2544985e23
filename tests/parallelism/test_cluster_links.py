"""Hosts of a mesh, and what their axes' links are."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import Shard

import torch_xmesh as xm
from torch_xmesh import _C
from torch_xmesh.parallelism.cluster import cluster_of, logical_shapes
from torch_xmesh.parallelism.compute import Compute

FAST, SLOW = Compute(2e12, 2e11), Compute(1e12, 1e11)


def mesh(num_hosts: int, num_devices: int) -> xm.Mesh:
    return xm.Mesh([[host * num_devices + device for device in range(num_devices)] for host in range(num_hosts)])


def test_rows_are_hosts() -> None:
    cluster = cluster_of(mesh(2, 4), None, FAST, None)
    assert [host.ranks for host in cluster.hosts] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert len(cluster.kinds) == 1
    assert cluster_of(xm.Mesh([3, 1, 2]), None, FAST, None).hosts[0].ranks == (3, 1, 2)
    topology = xm.Topology({0: 1, 1: 0, 2: 1, 3: 0})
    assert [host.ranks for host in cluster_of(xm.Mesh(range(4)), topology, FAST, None).hosts] == [(0, 2), (1, 3)]


def test_groups_that_leave_a_host_share_its_network() -> None:
    topology = xm.Topology(
        devices_per_host=4, nic_bytes_per_s=8, local_bytes_per_s=100, latency_us=3, local_latency_us=1
    )
    cluster = cluster_of(mesh(2, 4), topology, FAST, None)
    ranks = list(range(8))
    assert cluster.links(ranks, (8,))[0] == pytest.approx((8, 3e-6, 1 / 8, 4 * 4 / 7 / 8))
    assert cluster.links(ranks, (2, 4)) == [(2, 3e-6, 4 / 8, 4 / 8), (4, 1e-6, 1 / 100)]
    first, second = cluster.links(ranks, (4, 2))
    assert first == pytest.approx((4, 3e-6, 2 / 8, 2 * 2 * 2 / 3 / 8))
    assert second == (2, 1e-6, 1 / 100)
    assert cluster.links([0, 1], (2,)) == [(2, 1e-6, 1 / 100)]
    assert cluster.links([0, 1, 2, 3], (2, 2)) == [(2, 1e-6, 1 / 100)] * 2


def test_hosts_that_differ_are_classes() -> None:
    cluster = cluster_of(mesh(3, 2), None, {0: FAST, 1: SLOW, 2: FAST}, {0: 100, 1: 50, 2: 100})
    assert [kind.compute for kind in cluster.kinds] == [FAST, SLOW]
    assert [host.ranks for host in cluster.hosts_of(cluster.kinds[0])] == [(0, 1), (4, 5)]
    slowest = cluster.kind_of([1, 2])
    assert (slowest.compute, slowest.memory_bytes) == (SLOW, 50)
    nics = xm.Topology(devices_per_host=2, nic_of_host={1: 5})
    assert len(cluster_of(mesh(3, 2), nics, FAST, None).kinds) == 2


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="compute says nothing of host 1: it has 0"):
        cluster_of(mesh(2, 2), None, {0: FAST}, None)
    with pytest.raises(ValueError, match=r"memory_limit_bytes is a positive int or None, got -1 \(int\)"):
        cluster_of(mesh(2, 2), None, FAST, -1)
    with pytest.raises(ValueError, match="a mesh of one or two axes"):
        cluster_of(xm.Mesh([[[0]]]), None, FAST, None)
    with pytest.raises(ValueError, match="flops is a positive number, got 0"):
        Compute(0, 1)


def test_logical_shapes() -> None:
    assert logical_shapes(1, 1) == [(1,)]
    assert logical_shapes(1, 8) == [(8,), (2, 4), (4, 2)]
    assert logical_shapes(2, 8) == [(16,), (2, 8), (4, 4), (8, 2)]
    assert logical_shapes(3, 6) == [(18,), (3, 6), (6, 3), (9, 2)]


@pytest.mark.parametrize(("num_hosts", "num_devices"), [(2, 4), (2, 8), (4, 2)])
def test_an_all_to_all_takes_what_the_network_takes(num_hosts: int, num_devices: int) -> None:
    """As a reshard between the same placements is planned, where the network is all that counts."""
    topology = xm.Topology(
        devices_per_host=num_devices, nic_bytes_per_s=10**9, local_bytes_per_s=10**15, latency_us=0, local_latency_us=0
    )
    count = num_hosts * num_devices
    devices = xm.Mesh(range(count))
    (axis,) = cluster_of(devices, topology, FAST, None).links(range(count), (count,))
    num_bytes = 4 * 1024 * 1024
    predicted = _C.collective_cost("ring", "all-to-all", num_bytes, axis)
    source = xm.Spec((1024, 1024), torch.float32, devices, [Shard(0)])
    plan = xm.plan_resharding(source, devices, [Shard(1)], topology=topology)
    assert predicted == pytest.approx(plan.lower_bound_seconds, rel=0.01)
    assert predicted <= plan.predicted_seconds
