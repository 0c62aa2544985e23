"""What C++ throws has its Python class, whichever way it comes: PeerError, with the ranks to blame, on every path by
which torch hands a failed call to Python."""

from __future__ import annotations

import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

import torch_xmesh as xm
from torch_xmesh.testing import World, mark

SIZE = 3


def lost_collective() -> Any:
    return dist.all_reduce(torch.ones(4), async_op=True)


def lost_coalesced() -> Any:
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4))
    return manager


def lost_reshard() -> Any:
    """From the rank that dies to the others."""
    source = xm.Mesh([SIZE - 1])
    x: Any = xm.Spec((4,), torch.float32, source, (Replicate(),))
    if dist.get_rank() in source.ranks:
        x = DTensor.from_local(torch.ones(4), xm.device_mesh(source), [Replicate()], run_check=False)
    return xm.reshard(x, xm.Mesh([0, 1]), [Replicate()], async_op=True)[1]


def blocking() -> None:
    dist.all_reduce(torch.ones(4))


def functional_op() -> None:
    functional.wait_tensor(functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD))  # type: ignore[arg-type]


def functional_tensor() -> None:
    found = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)  # type: ignore[arg-type]
    (found + 1).sum().item()


def functional_compiled() -> None:
    def double(x: torch.Tensor) -> Any:
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1  # type: ignore[arg-type]

    torch.compile(double, backend="aot_eager")(torch.ones(4))


def redistribution() -> None:
    mesh = dist.init_device_mesh("cpu", (SIZE,))
    partial = DTensor.from_local(torch.ones(4), mesh, [Shard(0)], run_check=False)
    partial.redistribute(mesh, [Replicate()]).to_local().sum().item()


def in_a_backward() -> None:
    x = torch.ones(4, requires_grad=True)
    y = dist.nn.functional.all_reduce(x)  # type: ignore[no-untyped-call]
    y.sum().backward()


def value_of_future(work: Any) -> None:
    with pytest.raises(xm.PeerError):
        work.wait()
    work.get_future().value()


WAYS: dict[str, Callable[[Any], Any]] = {
    "Work.wait": lambda work: work.wait(),
    "Work.wait with a time limit": lambda work: work.wait(timedelta(seconds=60)),
    "Work.get_future().wait": lambda work: work.get_future().wait(),
    "Work.get_future().value": value_of_future,
}

PATHS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    f"{kind.__name__}, {way}": (kind, use) for kind in (lost_collective, lost_reshard) for way, use in WAYS.items()
}
PATHS["lost_coalesced, Work.wait"] = lost_coalesced, WAYS["Work.wait"]
PATHS |= {
    call.__name__: (call, lambda _: None)
    for call in (blocking, functional_op, functional_tensor, functional_compiled, redistribution, in_a_backward)
}


def on_all_paths(rank: int, world_size: int) -> dict[str, str]:
    dist.all_reduce(torch.ones(1))
    mesh = dist.init_device_mesh("cpu", (SIZE,))
    layer = nn.Linear(4, 4)
    ddp = DistributedDataParallel(layer)
    sharded: Any = fully_shard(nn.Linear(8, 8), mesh=mesh)
    ddp(torch.ones(2, 4)).sum().backward()
    sharded(torch.ones(2, 8)).sum().backward()
    lost_reshard().wait()
    forward = ddp(torch.ones(2, 4)).sum()
    if rank == SIZE - 1:
        mark("inside")
        signal.pause()
    paths = dict(PATHS)
    paths["DDP's backward"] = (lambda: None, lambda _: forward.backward())
    paths["FSDP2's forward"] = (lambda: None, lambda _: sharded(torch.ones(2, 8)))
    mark("inside")
    found = {}
    for name, (make, use) in paths.items():
        try:
            use(make())
            found[name] = "nothing was raised"
        except xm.PeerError as error:
            if error.ranks != (SIZE - 1,):
                found[name] = f"blames {error.ranks}"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {str(error)[:200]}"
    return found


def test_a_death_is_a_peer_error_on_every_path() -> None:
    with World(on_all_paths, SIZE) as world:
        for rank in range(SIZE):
            world.wait_mark(rank, "inside")
        world.signal(SIZE - 1, signal.SIGKILL)
        outcomes = world.join(60)
    for outcome in outcomes[:-1]:
        assert outcome.error is None, outcome.error
        assert outcome.value == {}
