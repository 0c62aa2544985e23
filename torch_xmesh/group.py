"""From a process group to the reshards that run on it."""

import os
import threading
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from torch_xmesh import _C
from torch_xmesh.backend import backend_of
from torch_xmesh.known_calls import KnownCalls
from torch_xmesh.plan_cache import Plans


class GroupReshards:
    """One process group's reshards on this rank: the C++ group, its plans and known calls, and who is calling.

    ``with`` it one thread at a time calls; a second one gets a RuntimeError. ``core`` is for any thread.
    """

    def __init__(self, backend: "_C.ProcessGroupXmesh", ranks: list[int]) -> None:
        self.backend = backend
        self.ranks = frozenset(ranks)
        self.plans = Plans(self.ranks, lambda: self.core)
        self.calls = KnownCalls(16 * self.plans.prepared.most)
        # Works of backwards, which nobody waits for to their end, with the tensors whose first use waits for them.
        self.unwatched: list[tuple[Any, list[torch.Tensor]]] = []
        self._in_order = ranks
        self._pid = os.getpid()
        self._core: _C.ReshardGroup | None = None
        self._caller = threading.Lock()

    @property
    def core(self) -> "_C.ReshardGroup":
        """The C++ group, made at the first use. RuntimeError once the process group is closed, and in a forked one."""
        self._check_process()
        if self._core is None:
            self._core = _C.reshard_group(self.backend, self._in_order)
        return self._core

    def raise_late_failure(self) -> None:
        """Raises what a former backward failed with after this rank had done its part in it. The caller's thread."""
        ended = [pair for pair in self.unwatched if pair[0].is_completed()]
        if not ended:
            return
        self.unwatched = [pair for pair in self.unwatched if not any(pair is other for other in ended)]
        for _, waiting in ended:
            for local in waiting:
                torch.ops._c10d_functional.wait_tensor(local)  # torch keeps the Work of one that is never used
        for work, _ in ended:
            work.wait()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                "this process was forked from the one that made the process group, whose threads it does not have: "
                "make a group here"
            )

    def __enter__(self) -> "GroupReshards":
        self._check_process()
        if not self._caller.acquire(blocking=False):
            raise RuntimeError(
                "two threads call reshard on one process group at once; give each thread a group of its own"
            )
        return self

    def __exit__(self, *exception: object) -> None:
        self._caller.release()


# Keyed by the group, whose Python object lives as long as it is in use; its backend's is made anew at each look.
_reshards: "WeakKeyDictionary[dist.ProcessGroup, GroupReshards]" = WeakKeyDictionary()
_lock = threading.Lock()


def _renew_lock() -> None:
    """Another thread may have held it at the fork."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def reshards_of(group: dist.ProcessGroup | None) -> GroupReshards:
    """The reshards of a process group. ValueError for a group on another backend, RuntimeError for a closed one."""
    chosen = dist.group.WORLD if group is None else group
    with _lock:
        known = _reshards.get(chosen) if isinstance(chosen, dist.ProcessGroup) else None
        if known is not None and not known.backend.is_closed:
            return known
        backend = backend_of(chosen)
        if backend.is_closed:
            raise RuntimeError("the process group is closed: no reshard can start on it")
        assert chosen is not None, "backend_of refuses a group that is not there"
        made = _reshards[chosen] = GroupReshards(backend, dist.get_process_group_ranks(chosen))
        return made


def group_of(group: dist.ProcessGroup | None) -> "_C.ReshardGroup":
    """The C++ side of :func:`reshards_of`."""
    return reshards_of(group).core
