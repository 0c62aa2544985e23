"""The child's side of :mod:`torch_xmesh.testing.spawn`: what one rank's process does."""

from __future__ import annotations

import faulthandler
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

import torch_xmesh  # noqa: F401  # registers the backend; imported here so that ranks forked from the server have it

_parent: Connection | None = None


@dataclass(frozen=True)
class Job:
    """What a rank is told at its start. ``args`` is pickled; it is read after the function's module is there."""

    rank: int
    world_size: int
    backend: str | None
    init_kwargs: dict[str, Any]
    environment: dict[str, str]
    log: str
    module: str
    file: str | None
    name: str
    args: bytes
    path: list[str]


def mark(text: str) -> None:
    """Called in a rank: tells the process that started the world that it has come here. See ``World.wait_mark``."""
    if _parent is None:
        raise RuntimeError("mark() is for ranks that torch_xmesh.testing started")
    _parent.send(("mark", text))


def main(job: Job, parent: Connection) -> None:
    """Runs the job and reports its value or its exception; then waits until every rank has reported, and leaves."""
    global _parent
    _parent = parent
    _redirect(job.log)
    os.environ.clear()
    os.environ.update(job.environment)
    sys.path[:] = job.path
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(0)  # each process from which ranks are forked has drawn a seed of its own
    dist.set_debug_level_from_env()
    report: tuple[bytes | None, str | None, str | None]
    try:
        fn = _load(job)
        if job.backend is not None:
            _init_process_group(job, parent)
        value = fn(job.rank, job.world_size, *pickle.loads(job.args))
        report = (pickle.dumps(value), None, None)
    except BaseException as error:
        kind = type(error)
        report = (None, traceback.format_exc(), f"{kind.__module__}.{kind.__qualname__}")
    parent.send(("report", report))
    if report[1] is not None:
        sys.stderr.flush()
        os._exit(1)
    _leave(parent)


def _redirect(log: str) -> None:
    """Sends stdout and stderr to the log, and every thread's stack when SIGUSR2 comes."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR2, sys.stderr, all_threads=True)


def _load(job: Job) -> Callable[..., Any]:
    """The function, from its module's file where the name alone does not lead there."""
    name = "__mp_main__" if job.module == "__main__" else job.module
    if name not in sys.modules and job.file is not None:
        spec = importlib.util.spec_from_file_location(name, job.file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    found: Any = importlib.import_module(name)
    for part in job.name.split("."):
        found = getattr(found, part)
    function: Callable[..., Any] = found
    return function


def _init_process_group(job: Job, parent: Connection) -> None:
    if job.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, job.world_size, True, wait_for_workers=False)
        parent.send(("port", store.port))
        _await(parent, "port")
    else:
        store = dist.TCPStore("127.0.0.1", _await(parent, "port"), job.world_size, False)
    dist.init_process_group(job.backend, store=store, rank=job.rank, world_size=job.world_size, **job.init_kwargs)


def _await(parent: Connection, kind: str) -> Any:
    while True:
        found, payload = parent.recv()
        if found == kind:
            return payload


def _leave(parent: Connection) -> None:
    """Rank 0 holds the store, so nobody leaves before everybody has reported."""
    try:
        _await(parent, "leave")
        if dist.is_initialized():
            dist.destroy_process_group()
    except EOFError:
        os._exit(1)
    sys.stdout.flush()
