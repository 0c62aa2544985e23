"""Sends are paced to planned rates where rates were measured and the group does not mind; the bytes are right."""

from __future__ import annotations

import datetime
import os
import socket
import struct

import torch
import torch.distributed as dist
from layouts import Layout, assert_same_bytes, dtensor_of, expected_of, source_of
from torch.distributed.tensor import Shard
from wait_until import wait_until

import torch_xmesh as xm
from torch_xmesh.testing import spawn

NIC_BYTES_PER_S = 4_000_000
# 8 rows of rank 0 go to ranks 2 (6) and 3 (2), 8 rows of rank 1 to ranks 3 (4) and 4 (4): each NIC sends half a MiB.
LAYOUT = Layout((16, 1 << 14), torch.float32, xm.Mesh([0, 1]), (Shard(0),), xm.Mesh([2, 3, 4]), (Shard(0),))
RATES = {0: [NIC_BYTES_PER_S // 4, NIC_BYTES_PER_S * 3 // 4], 1: [NIC_BYTES_PER_S // 2] * 2}
SO_MAX_PACING_RATE = 47  # Linux's, which Python's socket module does not name
UNPACED = 2**64 - 1


def own_rates() -> list[int]:
    """The limits, in bytes per second, of those of this process's sockets that have one."""
    rates: list[int] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            is_socket = os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except OSError:
            continue  # closed meanwhile
        if is_socket:
            with socket.socket(fileno=os.dup(int(name))) as one:
                rates += struct.unpack("Q", one.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, 8))
    return sorted(rate for rate in rates if rate != UNPACED)


def reshard_once(rank: int, world_size: int, strategy: str, is_measured: bool, pacing: bool) -> None:
    """Rank 3 comes to the second call late, when the others have looked: so they look at a call that is under way."""
    options = xm.Options()
    options.pacing, options.shared_memory = pacing, False
    group = dist.new_group(backend="xmesh", pg_options=options)
    topology = xm.Topology(devices_per_host=1, nic_bytes_per_s=NIC_BYTES_PER_S, is_measured=is_measured)
    store = dist.PrefixStore(f"{strategy}/{is_measured}/{pacing}", dist.distributed_c10d._get_default_store())

    def wait_for(*keys: str) -> None:
        store.wait(list(keys), datetime.timedelta(seconds=60))

    for turn, sign in (("connects", 1), ("is watched", -1)):  # no memory has such bytes before they come
        if rank == 3 and turn == "is watched":
            wait_for("0 has looked", "1 has looked")
        expected = sign * expected_of(LAYOUT)
        x = dtensor_of(sign * source_of(LAYOUT).to_local(), LAYOUT.shape, LAYOUT.src_mesh, LAYOUT.src)
        y, work = xm.reshard(
            x, LAYOUT.dst_mesh, LAYOUT.dst, strategy=strategy, topology=topology, async_op=True, group=group
        )
        into = y.to_local()
        if turn == "is watched" and rank in (2, 4):
            wait_until(lambda: torch.equal(into, expected))  # noqa: B023  # the call itself lasts until rank 3 has come
            store.set(f"{rank} has its bytes", "")
        elif turn == "is watched" and rank in RATES:
            wait_for("2 has its bytes", "4 has its bytes")
            assert not work.is_completed()
            rates = own_rates()
            assert rates == (RATES[rank] if is_measured and pacing else []), (strategy, is_measured, pacing, rates)
            store.set(f"{rank} has looked", "")
        work.wait()
        assert_same_bytes(into, expected, (strategy, is_measured, pacing))
        assert own_rates() == []


def paced_and_not(rank: int, world_size: int) -> None:
    for strategy in ("striped", "send_recv"):
        for is_measured, pacing in ((True, True), (True, False), (False, True)):
            reshard_once(rank, world_size, strategy, is_measured, pacing)


def test_sends_are_paced_where_that_is_wanted() -> None:
    spawn(paced_and_not, 5)
