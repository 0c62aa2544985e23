"""Reshards over links that are cut, slowed and restored: they complete, or every rank names whom it cannot reach."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from wait_until import wait_until

from torch_xmesh.testing.cluster import EmulatedCluster, Job, network

pytestmark = pytest.mark.skipif(
    network.unavailable_reason() is not None, reason="runs on Linux as root, with iproute2 and tc"
)

HOSTS = 3
TIMEOUT = 6.0
# The host whose link fails, by strategy. In the last two rank 1 passes on to rank 2 what it gets from rank 0.
FAILING_HOST = {"send_recv": 2, "broadcast": 1, "striped": 1}
by_strategy = pytest.mark.parametrize(
    "strategy",
    [pytest.param(name, marks=[] if name == "broadcast" else [pytest.mark.soak]) for name in FAILING_HOST],
)

# Rank 0 feeds ranks 1 and 2: 2 MiB a time, every element checked. The first element says which call is the last: the
# one that rank 0 begins once there is a file "last". After a PeerError a rank stays, so that nobody is blamed for
# leaving, until the test has opened its pipe. A line is one string, hence one write: no half of it is ever read.
WORKER = """
import datetime, os, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch.distributed.tensor import Replicate
import torch_xmesh as xm
from torch_xmesh.spec import wrap_local
strategy, timeout, folder = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
dist.init_process_group("xmesh", timeout=datetime.timedelta(seconds=timeout))
rank, shape, source, target = dist.get_rank(), torch.Size([1 << 19]), xm.Mesh([0]), xm.Mesh([1, 2])
whole = torch.arange(1 << 19, dtype=torch.int32)
x = spec = xm.Spec(shape, torch.int32, source, (Replicate(),))
if rank == 0:
    x = wrap_local(whole, shape, xm.device_mesh(source), (Replicate(),))
call, is_last = 0, False
while not is_last:
    if rank == 0:
        whole[0] = (folder / "last").exists()
    try:
        y = xm.reshard(x, target, (Replicate(),), strategy=strategy).to_local()
    except xm.PeerError as error:
        print(f"PEER_ERROR {error.ranks}", flush=True)
        (folder / f"leave{rank}").read_text()
        break
    got = whole if rank == 0 else y
    is_last = bool(got[0])
    assert torch.equal(got[1:], whole[1:])
    print(f"call {call} done", flush=True)
    call += 1
else:
    plan = xm.plan_resharding(spec, target, (Replicate(),), strategy=strategy)
    assert (plan.bytes_sent(1) > 0) == (strategy != "send_recv")
    dist.barrier()  # all have what was sent to them
    print("ALL_DONE", flush=True)
os._exit(0)  # the group's store may be beyond a cut
"""


@pytest.fixture
def cluster() -> Iterator[EmulatedCluster]:
    with EmulatedCluster(hosts=HOSTS, devices=1, rate="100mbit") as made:
        yield made


def start(cluster: EmulatedCluster, folder: Path, strategy: str, timeout: float) -> Job:
    script = folder / "worker.py"
    script.write_text(WORKER)
    for rank in range(HOSTS):
        os.mkfifo(folder / f"leave{rank}")
    job = cluster.start(str(script), strategy, str(timeout), str(folder), stop_on_failure=False)
    for rank in range(HOSTS):
        job.wait_for_output("call 2 done", rank=rank, timeout=90)
    return job


def calls_done(job: Job, rank: int) -> int:
    return len(re.findall(r"call \d+ done", job.ranks[rank].output))


def wait_for_calls(job: Job, count: int) -> None:
    """Until every rank has ended `count` more calls."""
    for rank in range(HOSTS):
        job.wait_for_output(f"call {calls_done(job, rank) + count - 1} done", rank=rank, timeout=60)


def on_host(cluster: EmulatedCluster, host: int, *command: str) -> str:
    assert cluster._network is not None
    line = cluster._network.command_on(host, command)
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout


def link_of(cluster: EmulatedCluster, host: int) -> str:
    """How the kernel shapes what the host sends."""
    return on_host(cluster, host, "tc", "qdisc", "show", "dev", network.HOST_INTERFACE)


def received_bytes(cluster: EmulatedCluster, host: int) -> int:
    return int(on_host(cluster, host, "cat", f"/sys/class/net/{network.HOST_INTERFACE}/statistics/rx_bytes"))


def is_stalled(cluster: EmulatedCluster, host: int) -> bool:
    """Whether a kernel has sent something over this host's link three times, and waits for an acknowledgement still."""
    ends = [pair for other in range(HOSTS) if other != host for pair in ((host, other), (other, host))]
    sockets = "".join(on_host(cluster, end, "ss", "-tinHO", "dst", cluster.address(other)) for end, other in ends)
    waiting = [line for line in sockets.splitlines() if "unacked:" in line]
    return any(int(found) >= 2 for found in re.findall(r"backoff:(\d+)", "".join(waiting)))


@by_strategy
def test_a_cut_link_is_told(cluster: EmulatedCluster, tmp_path: Path, strategy: str) -> None:
    job = start(cluster, tmp_path, strategy, TIMEOUT)
    behind = FAILING_HOST[strategy]
    cluster.cut(behind)
    for rank in range(HOSTS):
        job.wait_for_output("PEER_ERROR", rank=rank, timeout=60)
    for rank, handle in enumerate(job.ranks):
        told = re.search(r"PEER_ERROR \(([\d, ]*)\)", handle.output)
        assert told, handle.output
        blamed = {int(found) for found in re.findall(r"\d+", told[1])}
        if rank == behind:
            assert blamed, handle.output
            assert blamed <= set(range(HOSTS)) - {behind}, handle.output
        else:
            assert blamed == {behind}, handle.output
    for rank in range(HOSTS):
        (tmp_path / f"leave{rank}").write_text("")
    assert job.wait(30) == [0, 0, 0]


@by_strategy
def test_a_slow_and_a_briefly_cut_link_only_cost_time(cluster: EmulatedCluster, tmp_path: Path, strategy: str) -> None:
    job = start(cluster, tmp_path, strategy, 60.0)
    assert "rate 100Mbit" in link_of(cluster, 0)
    cluster.slow(0, 10)
    assert "rate 10Mbit" in link_of(cluster, 0)
    wait_for_calls(job, 2)  # the first one may have been under way

    failing = FAILING_HOST[strategy]
    cluster.cut(failing)
    arrived, calls = received_bytes(cluster, failing), calls_done(job, failing)
    wait_until(lambda: is_stalled(cluster, failing))
    assert received_bytes(cluster, failing) == arrived
    assert calls_done(job, failing) <= calls + 1
    cluster.restore(failing)
    cluster.restore(0)
    wait_for_calls(job, 2)
    (tmp_path / "last").touch()
    for rank in range(HOSTS):
        job.wait_for_output("ALL_DONE", rank=rank, timeout=90)
    assert job.wait(30) == [0, 0, 0]
