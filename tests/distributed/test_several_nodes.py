"""Two hosts, torchrun on each, and own names that resolve to loopback, as Debian sets them up."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from torch_xmesh.testing.cluster import EmulatedCluster

TRAIN = """
import json, os
import torch, torch.distributed as dist
from torch.distributed.tensor import DeviceMesh, DTensor, Replicate
import torch_xmesh as xm

dist.init_process_group("xmesh")
rank = dist.get_rank()
total = torch.full((3,), float(rank + 1))
dist.all_reduce(total)
left, right = DeviceMesh("cpu", [0]), DeviceMesh("cpu", [1])
spec = xm.Spec((6,), torch.float32, left, [Replicate()])
x = DTensor.from_local(torch.arange(6.0), left, [Replicate()]) if rank == 0 else spec
y = xm.reshard(x, right, [Replicate()])
print(json.dumps({"rank": rank, "sum": total.tolist(), "moved": y.to_local().tolist()}), flush=True)
dist.destroy_process_group()
"""

# torchrun on a host as Debian sets it up: it has a name of its own, which its own /etc/hosts has on loopback.
AGENT = """
import os, sys
folder, *meeting = sys.argv[1:]
host = os.environ["GROUP_RANK"]
del os.environ["GLOO_SOCKET_IFNAME"]
as_debian = f'mount --bind {folder}/hosts{host} /etc/hosts && hostname node{host} && exec "$@"'
torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
torchrun += [*(one.format(host=host) for one in meeting), f"{folder}/train.py"]
os.execvp("unshare", ["unshare", "--mount", "--uts", "sh", "-c", as_debian, "sh", *torchrun])
"""


@pytest.fixture(scope="module")
def nodes() -> Iterator[EmulatedCluster]:
    with EmulatedCluster(hosts=2, devices=1, rate="1gbit") as cluster:
        if not cluster.is_shaped:
            pytest.skip(f"runs on Linux as root, with iproute2 (network namespaces): {cluster.unshaped_reason}")
        yield cluster


@pytest.mark.parametrize(
    "meeting",
    [
        ("--rdzv-backend=c10d", "--rdzv-id=job", "--rdzv-endpoint=node0:29400"),
        ("--master-addr=node0", "--master-port=29401", "--node-rank={host}"),
    ],
    ids=["c10d", "static"],
)
def test_own_names_on_loopback(nodes: EmulatedCluster, tmp_path: Path, meeting: tuple[str, ...]) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "agent.py").write_text(AGENT)
    for host in range(2):
        lines = ["127.0.0.1 localhost", f"127.0.1.1 node{host}"]
        lines += [f"{prefix}{nodes.address(1 - host)} node{1 - host}" for prefix in ("", "::ffff:")]
        (tmp_path / f"hosts{host}").write_text("\n".join([*lines, ""]))
    job = nodes.run(str(tmp_path / "agent.py"), str(tmp_path), *meeting)
    assert job.exit_codes == [0, 0], "\n".join(handle.output for handle in job.ranks)
    found = [json.loads(line) for handle in job.ranks for line in handle.output.splitlines() if line.startswith("{")]
    assert sorted(found, key=lambda one: one["rank"]) == [
        {"rank": 0, "sum": [3.0] * 3, "moved": []},
        {"rank": 1, "sum": [3.0] * 3, "moved": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]},
    ]
