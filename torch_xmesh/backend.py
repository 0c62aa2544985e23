"""The c10d backend ``xmesh``: its registration, and the inner backends that carry each device kind.

``import torch_xmesh`` registers it; ``init_process_group("xmesh")`` and ``"cpu:xmesh,cuda:xmesh"`` then make groups on
it. gloo carries cpu tensors and is made with the group. An accelerator's tensors are carried by the backend that
``Options.inner`` names for its kind, for cuda NCCL; it is made at the first of them.
"""

from __future__ import annotations

import atexit
import copy
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _DistributedBackendOptions

from torch_xmesh._C import ProcessGroupXmesh, address_towards, end_live_groups

__all__ = ["Options", "ProcessGroupXmesh", "backend_of", "register"]

Options = ProcessGroupXmesh.Options


def register() -> None:
    """Registers ``xmesh`` with torch.distributed for cpu and cuda tensors. Safe to call again."""
    if "XMESH" not in dist.Backend._plugins:
        dist.Backend.register_backend("xmesh", _create, extended_api=True, devices=["cpu", "cuda"])
        atexit.register(_end_groups)


def _end_groups() -> None:
    """Before the interpreter ends: threads of a group that need its lock later would abort the process."""
    end_live_groups(has_failed=hasattr(sys, "last_value"))


def backend_of(group: dist.ProcessGroup | None = None) -> ProcessGroupXmesh:
    """The xmesh backend of a process group (None: the default group), also behind TORCH_DISTRIBUTED_DEBUG=DETAIL.

    Raises ValueError when the group does not run on xmesh, or this rank is not in it.
    """
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise ValueError("the default process group has not been initialized; expected init_process_group('xmesh')")
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"this rank is not in the group: expected a ProcessGroup, got {group!r}")
    for device in group._device_types:
        backend: Any = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)
        if isinstance(backend, ProcessGroupXmesh):
            return backend
    raise ValueError(f"expected a process group on xmesh, got one on {dist.get_backend(group)}")


def _create(created: Any, given: Any) -> ProcessGroupXmesh:
    """What c10d calls for each new group: ``created`` describes it, ``given`` is the user's ``pg_options``."""
    if any(getattr(made, "enable_reconfigure", False) for made in (created, given)):
        raise ValueError(
            "enable_reconfigure: expected False, got True: a group on xmesh keeps the ranks that it was made with; for "
            "others call destroy_process_group, then init_process_group"
        )
    options = _options(given)
    if not options.inner and (default := _default_options()) is not None:
        options.inner = default.inner
    options._timeout = created.timeout
    options.blocking_wait = options.blocking_wait or os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1"
    options.group_name = created.group_id
    options.global_ranks_in_group = created.global_ranks_in_group
    accelerators = [kind for kind, name in _inner_names(options).items() if _is_there(kind, name)]
    return ProcessGroupXmesh(created.store, created.group_rank, created.group_size, options, _make_inner, accelerators)


def _default_options() -> Options | None:
    """Of the default group, if there is one on xmesh: its inner backends carry the devices of later groups, too, as
    c10d gives these its backends."""
    if not dist.is_initialized():
        return None
    try:
        return backend_of().options
    except ValueError:
        return None


def _inner_names(options: Options) -> dict[str, str]:
    """The inner backend of each kind of accelerator: those that the user named first. ValueError for one that is not
    known."""
    for kind, name in options.inner.items():
        if kind == "cpu":
            raise ValueError("Options.inner names the backends of accelerators; cpu tensors are carried by gloo")
        if name not in ("nccl", "xccl") and name.upper() not in dist.Backend._plugins:
            raise ValueError(
                f"Options.inner[{kind!r}]: expected nccl, xccl or a backend given to register_backend(), got {name!r}"
            )
    return {**options.inner, **({} if "cuda" in options.inner else {"cuda": "nccl"})}


def _is_there(kind: str, name: str) -> bool:
    """Whether this machine has the device and its backend."""
    if (name == "nccl" and not dist.is_nccl_available()) or (name == "xccl" and not dist.is_xccl_available()):
        return False
    return bool(torch.get_device_module(kind).is_available())


def _options(given: Any) -> Options:
    if given is None:
        return Options()
    if isinstance(given, Options):
        return copy.copy(given)
    options = Options()
    if isinstance(given, dist.ProcessGroupGloo.Options):
        options.gloo = given
    elif dist.is_nccl_available() and isinstance(given, dist.ProcessGroupNCCL.Options):
        options.nccl = given
    else:
        raise ValueError(
            "pg_options of a group on xmesh: expected torch_xmesh.backend.Options, or the Options of ProcessGroupGloo "
            f"or ProcessGroupNCCL, got {type(given).__qualname__}"
        )
    return options


def _make_inner(kind: str, store: dist.Store, rank: int, size: int, options: Options) -> Any:
    """Makes the backend that carries one device kind. Blocks, for gloo, until every rank of the group is here."""
    inner_store = dist.PrefixStore(f"xmesh_{kind}", store)
    name = "gloo" if kind == "cpu" else _inner_names(options)[kind]
    make = {"gloo": _make_gloo, "nccl": _make_nccl, "xccl": _make_xccl}.get(name)
    return make(inner_store, rank, size, options) if make else _make_plugin(name, inner_store, rank, size, options)


def _make_gloo(store: dist.Store, rank: int, size: int, options: Options) -> Any:
    given: Any = options.gloo
    address = None if os.environ.get("GLOO_SOCKET_IFNAME") else address_towards(store)
    chosen: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    chosen._timeout = options._timeout
    if given is not None:
        chosen._threads, chosen._devices = given._threads, given._devices
    if not chosen._devices and address is not None:
        # gloo by itself takes what the host's own name resolves to: on Debian, an address that only this host reaches.
        chosen._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    if chosen._devices:
        backend: Any = dist.ProcessGroupGloo(store, rank, size, chosen)
    else:
        backend = dist.ProcessGroupGloo(store, rank, size, timeout=options._timeout)
    backend.options.global_ranks_in_group = options.global_ranks_in_group
    backend.options.group_name = options.group_name
    return backend


def _make_nccl(store: dist.Store, rank: int, size: int, options: Options) -> Any:
    chosen: Any = dist.ProcessGroupNCCL.Options() if options.nccl is None else copy.deepcopy(options.nccl)
    chosen._timeout = options._timeout
    chosen.global_ranks_in_group = options.global_ranks_in_group
    chosen.group_name = options.group_name
    return dist.ProcessGroupNCCL(store, rank, size, chosen)


def _make_xccl(store: dist.Store, rank: int, size: int, options: Options) -> Any:
    make: Any = vars(dist)["ProcessGroupXCCL"]  # where torch was built with it
    chosen = make.Options()
    chosen._timeout = options._timeout
    chosen.global_ranks_in_group = options.global_ranks_in_group
    chosen.group_name = options.group_name
    return make(store, rank, size, chosen)


def _make_plugin(name: str, store: dist.Store, rank: int, size: int, options: Options) -> Any:
    """A backend that register_backend() knows, made as c10d makes it."""
    plugin = dist.Backend._plugins[name.upper()]
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, options._timeout)
    wanted = _DistributedBackendOptions()
    wanted.store, wanted.group_rank, wanted.group_size = store, rank, size
    wanted.timeout, wanted.group_id = options._timeout, options.group_name
    wanted.global_ranks_in_group = options.global_ranks_in_group
    return plugin.creator_fn(wanted, None)
