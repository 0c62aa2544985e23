"""From a process group to the reshards that run on it."""

import threading
from weakref import WeakKeyDictionary

import torch.distributed as dist

from torch_xmesh import _C
from torch_xmesh.backend import backend_of


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
