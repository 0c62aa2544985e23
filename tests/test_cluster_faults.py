"""Reshards over links that are cut, slowed and restored: they complete, or every rank names whom it cannot reach."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_xmesh.testing.cluster import Cluster, Job, network

pytestmark = pytest.mark.skipif(
    network.unavailable_reason() is not None, reason="needs root, iproute2 and tc: network namespaces with shaped links"
)

TIMEOUT = 6.0

# Rank 0 feeds ranks 1 and 2: 4 MiB a time, every element checked. It stops after `calls`, or at the first PeerError.
WORKER = """
import datetime, sys, time
import torch, torch.distributed as dist
from torch.distributed.tensor import Replicate
import torch_xmesh as xm
from torch_xmesh.spec import wrap_local
calls, timeout = int(sys.argv[1]), float(sys.argv[2])
dist.init_process_group("xmesh", timeout=datetime.timedelta(seconds=timeout))
rank, shape, source, target = dist.get_rank(), torch.Size([1 << 20]), xm.Mesh([0]), xm.Mesh([1, 2])
whole = torch.arange(1 << 20, dtype=torch.int32)
x = xm.Spec(shape, torch.int32, source, (Replicate(),))
if rank == 0:
    x = wrap_local(whole, shape, xm.device_mesh(source), (Replicate(),))
for call in range(calls):
    start = time.monotonic()
    try:
        y = xm.reshard(x, target, (Replicate(),), strategy="send_recv")
    except xm.PeerError as error:
        took = time.monotonic() - start
        print("PEER_ERROR", error.ranks, "in time" if took < timeout + 5 else f"late: {took:.1f} s", flush=True)
        break
    assert rank == 0 or torch.equal(y.to_local(), whole)
    print("call", call, "done", flush=True)
else:
    dist.barrier()  # all have what was sent to them
    print("ALL_DONE", flush=True)
import os
os._exit(0)  # the group's store is beyond the cut
"""


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(hosts=3, devices=1, rate="200mbit") as made:
        yield made


def start(cluster: Cluster, tmp_path: Path, calls: int, timeout: float) -> Job:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    job = cluster.start(str(script), str(calls), str(timeout), stop_on_failure=False)
    for rank in range(3):
        job.wait_for_output("call 0 done", rank=rank, timeout=90)
    return job


def test_a_cut_link_is_told_in_time(cluster: Cluster, tmp_path: Path) -> None:
    job = start(cluster, tmp_path, 10_000, TIMEOUT)
    cluster.cut(2)
    for rank in range(3):
        job.wait_for_output("PEER_ERROR", rank=rank, timeout=60)
    assert job.wait(30) == [0, 0, 0]
    for handle in job.ranks:
        assert "in time" in handle.output, handle.output
    # The first to find out blames the host behind the cut; the other may see it leave before it hears why.
    told = job.ranks[0].output + job.ranks[1].output
    assert "PEER_ERROR (2,)" in told, told


def test_a_slow_and_a_briefly_cut_link_only_cost_time(cluster: Cluster, tmp_path: Path) -> None:
    job = start(cluster, tmp_path, 12, 60.0)
    cluster.slow(1, 10)
    job.wait_for_output("call 2 done", rank=1, timeout=60)
    cluster.cut(2)
    cluster.restore(2)
    cluster.restore(1)
    for rank in range(3):
        job.wait_for_output("ALL_DONE", rank=rank, timeout=90)
    assert job.wait(30) == [0, 0, 0]
