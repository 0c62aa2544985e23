"""From a process group to the reshards that run on it."""

import threading
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from torch_xmesh import _C


class GroupReshards:
    """One process group's reshards on this rank: the C++ group, the plans made so far, and who is calling."""

    def __init__(self, core: "_C.ReshardGroup", size: int) -> None:
        self.core = core
        self.size = size
        self.plans: dict[object, object] = {}
        self._caller = threading.Lock()

    def __enter__(self) -> "GroupReshards":
        if not self._caller.acquire(blocking=False):
            raise RuntimeError("two threads call reshard on one process group at once; give each thread a group of its own")
        return self

    def __exit__(self, *exception: object) -> None:
        self._caller.release()


_reshards: "WeakKeyDictionary[_C.ProcessGroupXmesh, GroupReshards]" = WeakKeyDictionary()


def backend_of(group: dist.ProcessGroup | None) -> "_C.ProcessGroupXmesh":
    """The xmesh backend of a process group (None: the default group). Raises ValueError when it runs on another backend."""
    if not dist.is_initialized():
        raise ValueError("there is no process group: call torch.distributed.init_process_group('xmesh') first")
    chosen = dist.group.WORLD if group is None else group
    if not isinstance(chosen, dist.ProcessGroup):
        raise ValueError("this rank is not in the process group that was given")
    backend = chosen._get_backend(torch.device("cpu"))
    if not isinstance(backend, _C.ProcessGroupXmesh):
        raise ValueError(f"reshard needs a process group on the backend 'xmesh', this one runs on {backend.name()!r}")
    return backend


def reshards_of(group: dist.ProcessGroup | None) -> GroupReshards:
    """The reshards of a process group. Raises ValueError for a group on another backend, RuntimeError for a closed one."""
    backend = backend_of(group)
    known = _reshards.get(backend)
    if known is None or backend.is_closed:
        ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        known = GroupReshards(_C.reshard_group(backend, ranks), len(ranks))
        _reshards[backend] = known
    return known


def group_of(group: dist.ProcessGroup | None) -> "_C.ReshardGroup":
    """The C++ side of :func:`reshards_of`."""
    return reshards_of(group).core
