"""Processes from which ranks are forked, one for each hash seed.

Python hashes strings by a seed that each interpreter draws at its start, and so iterates over sets of them in an order
of its own. torchrun starts an interpreter for each rank; ranks that are forked share the seed of whom they were forked
from.
"""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import threading
from collections.abc import Iterator, Mapping
from multiprocessing.process import BaseProcess
from unittest import mock

_NUM_USUAL_SEEDS = 4

# What a server imports once, so that no rank has to.
_PRELOAD = [
    "torch_xmesh.testing._rank",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "hypothesis",
]

_lock = threading.Lock()
_servers: dict[str, multiprocessing.forkserver.ForkServer] = {}


def usual_seed(rank: int) -> int:
    """What a rank's hash seed is where nobody asks for another one: neighbors have different ones."""
    return 1 + rank % _NUM_USUAL_SEEDS


def start_forked(process: BaseProcess, seed: int) -> None:
    """Starts a process of the context "forkserver", forked from a server with this hash seed, which is started if there
    is none yet."""
    with _lock, _environment({"PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": _num_threads()}):
        server = _servers.get(str(seed))
        if server is None:
            server = _servers[str(seed)] = multiprocessing.forkserver.ForkServer()
            server.set_forkserver_preload(_PRELOAD)
        with mock.patch.object(multiprocessing.forkserver, "connect_to_new_process", server.connect_to_new_process):
            process.start()


def start_fresh(process: BaseProcess, seed: int) -> None:
    """Starts a process of the context "spawn" with this hash seed."""
    with _lock, _environment({"PYTHONHASHSEED": str(seed), "OMP_NUM_THREADS": _num_threads()}):
        process.start()


def _num_threads() -> str:
    return os.environ.get("OMP_NUM_THREADS", "1")


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    saved = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
