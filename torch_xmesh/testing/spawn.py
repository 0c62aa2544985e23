"""Runs a function on real processes, one per rank, and brings back what every rank returned, raised and printed.

    outcome = spawn(check, 4, "broadcast")                      # check(rank, world_size, "broadcast") on xmesh, 4 ranks
    with World(check, 4, backend="gloo") as world:              # the same with the ranks in hand
        world.wait_mark(2, "half way")                          # rank 2 called mark("half way")
        world.signal(2, signal.SIGKILL)
        outcomes = world.join(timeout=30)

Ranks are forked from small server processes that have imported torch and started nothing, so that a world starts in
well under a second; ``fresh=True`` gives every rank an interpreter of its own instead (and a full interpreter exit).
Neighbors iterate over sets of strings in different orders, as ranks that torchrun starts do; torch's random numbers are
those of seed 0 on all of them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

from torch_xmesh.testing import _rank, _servers
from torch_xmesh.testing._rank import mark

__all__ = ["RankError", "RankOutcome", "World", "mark", "spawn"]

_GRACE_SECONDS = 10.0  # what surviving ranks get to end by themselves once one has failed


@dataclass(frozen=True)
class RankOutcome:
    """How one rank ended.

    Attributes:
        rank: which one.
        value: what the function returned.
        error: the formatted traceback of what it raised, or None.
        error_type: the class's qualified name, or None.
        exitcode: 0, 1 after an exception, ``-signal`` when killed, None while it runs.
        output: its stdout and stderr.
    """

    rank: int
    value: Any
    error: str | None
    error_type: str | None
    exitcode: int | None
    output: str


class RankError(RuntimeError):
    """A rank raised, died or did not end in time: shows every rank's traceback and the end of its output."""

    def __init__(self, message: str, outcomes: list[RankOutcome]) -> None:
        super().__init__(message + "".join(_describe(outcome) for outcome in outcomes))
        self.outcomes = outcomes


def _describe(outcome: RankOutcome) -> str:
    state = "still running" if outcome.exitcode is None else f"exit code {outcome.exitcode}"
    text = f"\n--- rank {outcome.rank}: {state}"
    if outcome.error:
        text += f"\n{outcome.error.rstrip()}"
    tail = outcome.output.rstrip().splitlines()[-40:]
    return text + ("\noutput:\n  " + "\n  ".join(tail) if tail else "")


def spawn(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    backend: str | None = "xmesh",
    init_kwargs: Mapping[str, Any] | None = None,
    env: Mapping[str, str] | None = None,
    fresh: bool = False,
    hash_seeds: Sequence[int] | None = None,
) -> list[Any]:
    """Runs ``fn(rank, world_size, *args)`` on ``world_size`` processes and returns what each rank returned, by rank.

    Arguments are those of :class:`World`. Raises :class:`RankError` when a rank raises, dies, or is not done after
    ``timeout`` seconds; every process has ended when this returns or raises.
    """
    with World(
        fn, world_size, *args, backend=backend, init_kwargs=init_kwargs, env=env, fresh=fresh, hash_seeds=hash_seeds
    ) as world:
        return world.results(timeout)


class World:
    """Ranks that run ``fn(rank, world_size, *args)``, started at construction; use it as a context manager.

    Args:
        fn: a module-level function; its value must pickle.
        world_size: number of ranks.
        backend: the backend of the default process group, which exists when ``fn`` starts (a TCP store in rank 0 on a
            free port); None: no group, but the environment that ``env://`` reads.
        init_kwargs: more keyword arguments for ``init_process_group``.
        env: environment variables for every rank, on top of this process's.
        fresh: an interpreter of its own for every rank, slower to start.
        hash_seeds: by rank, what its interpreter has as PYTHONHASHSEED; by default neighbors have different ones.

    Threading: a thread of this object talks to the ranks; methods may be called from any thread.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        *args: Any,
        backend: str | None = "xmesh",
        init_kwargs: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        fresh: bool = False,
        hash_seeds: Sequence[int] | None = None,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, got {world_size}")
        seeds = list(map(_servers.usual_seed, range(world_size))) if hash_seeds is None else list(hash_seeds)
        if len(seeds) != world_size:
            raise ValueError(f"hash_seeds has {len(seeds)} entries for {world_size} ranks")
        self.world_size = world_size
        self._folder = tempfile.TemporaryDirectory(prefix="xmesh_world_")
        self._changed = threading.Condition()
        self._marks: list[list[str]] = [[] for _ in range(world_size)]
        self._reports: list[tuple[bytes | None, str | None, str | None] | None] = [None] * world_size
        self._released = False
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection | None] = []
        port = _free_port()
        for rank in range(world_size):
            job = _rank.Job(
                rank=rank,
                world_size=world_size,
                backend=backend,
                init_kwargs=dict(init_kwargs or {}),
                environment={**os.environ, **(env or {}), **_rank_environment(rank, world_size, port)},
                log=str(self._log(rank)),
                module=fn.__module__,
                file=getattr(sys.modules.get(fn.__module__), "__file__", None),
                name=fn.__qualname__,
                args=pickle.dumps(args),
                path=list(sys.path),
            )
            self._start(job, fresh, seeds[rank])
        self._pump = threading.Thread(target=self._run, name="xmesh-world", daemon=True)
        self._pump.start()

    def __enter__(self) -> World:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids by rank."""
        return [process.pid or -1 for process in self._processes]

    def signal(self, rank: int, number: int) -> None:
        """Sends a signal, e.g. ``signal.SIGKILL``, to a rank's process; no error if it has ended."""
        pid = self._processes[rank].pid
        if pid is not None and self._processes[rank].exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def wait_mark(self, rank: int, text: str, timeout: float = 60.0) -> None:
        """Waits until the rank has called ``mark(text)``; RankError if it ends first, or after ``timeout`` s."""
        with self._changed:
            self._changed.wait_for(lambda: text in self._marks[rank] or self._ended(rank), timeout)
            if text in self._marks[rank]:
                return
        self._dump_stacks()
        raise RankError(f"rank {rank} did not reach the mark {text!r} in {timeout} s", self.outcomes())

    def wait(self, rank: int, timeout: float = 60.0) -> RankOutcome:
        """Waits until the rank's function is done, or its process has ended. RankError after ``timeout`` seconds."""
        with self._changed:
            done = self._changed.wait_for(lambda: self._reports[rank] is not None or self._ended(rank), timeout)
        if not done:
            self._dump_stacks()
            raise RankError(f"rank {rank} is not done after {timeout} s", self.outcomes())
        return self.outcomes()[rank]

    def join(self, timeout: float = 60.0) -> list[RankOutcome]:
        """Waits until every process has ended, however it did. RankError after ``timeout`` seconds."""
        with self._changed:
            done = self._changed.wait_for(lambda: all(map(self._ended, range(self.world_size))), timeout)
        if not done:
            self._dump_stacks()
            raise RankError(f"ranks are still running after {timeout} s", self.outcomes())
        return self.outcomes()

    def results(self, timeout: float = 120.0) -> list[Any]:
        """Waits for every rank and returns their values.

        RankError when one raised, died, or is not done after ``timeout`` seconds.
        """

        def failed() -> bool:
            return any(
                (report is not None and report[1] is not None) or (report is None and self._ended(rank))
                for rank, report in enumerate(self._reports)
            )

        def ended() -> bool:
            return all(map(self._ended, range(self.world_size)))

        deadline = time.monotonic() + timeout
        with self._changed:
            self._changed.wait_for(lambda: failed() or ended(), timeout)
            if failed():
                self._changed.wait_for(ended, min(_GRACE_SECONDS, max(0.0, deadline - time.monotonic())))
        if not ended():
            self._dump_stacks()
        outcomes = self.outcomes()
        if failed():
            bad = next(
                o for o in outcomes if o.error is not None or (self._reports[o.rank] is None and o.exitcode is not None)
            )
            raise RankError(f"rank {bad.rank} failed", outcomes)
        if not ended():
            raise RankError(f"ranks are still running after {timeout} s", outcomes)
        if any(outcome.exitcode != 0 for outcome in outcomes):
            raise RankError("a rank's process failed at its exit", outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(self) -> list[RankOutcome]:
        """What is known of every rank now."""
        result = []
        for rank, process in enumerate(self._processes):
            pickled, error, error_type = self._reports[rank] or (None, None, None)
            value = None if pickled is None else pickle.loads(pickled)
            log = self._log(rank)
            output = log.read_text(errors="replace") if log.exists() else ""
            result.append(RankOutcome(rank, value, error, error_type, process.exitcode, output))
        return result

    def close(self) -> None:
        """Kills what still runs and frees everything. Safe to call again."""
        for rank in range(self.world_size):
            self.signal(rank, signal.SIGKILL)
        for process in self._processes:
            process.join(30)
        self._pump.join(30)
        self._folder.cleanup()

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}.log"

    def _start(self, job: _rank.Job, fresh: bool, seed: int) -> None:
        ours, theirs = multiprocessing.Pipe()
        context: Any = multiprocessing.get_context("spawn" if fresh else "forkserver")
        process = context.Process(target=_rank.main, args=(job, theirs), name=f"rank{job.rank}", daemon=True)
        (_servers.start_fresh if fresh else _servers.start_forked)(process, seed)
        theirs.close()
        self._processes.append(process)
        self._connections.append(ours)

    def _ended(self, rank: int) -> bool:
        return self._connections[rank] is None

    def _run(self) -> None:
        """The object's thread: collects messages until every process has ended."""
        while any(connection is not None for connection in self._connections):
            live = {connection: rank for rank, connection in enumerate(self._connections) if connection is not None}
            for ready in wait(list(live)):
                assert isinstance(ready, Connection)
                self._receive(live[ready], ready)

    def _receive(self, rank: int, connection: Connection) -> None:
        try:
            kind, payload = connection.recv()
        except (EOFError, OSError):
            self._processes[rank].join()
            kind, payload = "end", None
        with self._changed:
            if kind == "end":
                connection.close()
                self._connections[rank] = None
            elif kind == "mark":
                self._marks[rank].append(payload)
            elif kind == "port":
                self._tell_all(("port", payload))
            elif kind == "report":
                self._reports[rank] = payload
            everyone = all(self._reports[r] is not None or self._ended(r) for r in range(self.world_size))
            if everyone and not self._released:
                self._released = True
                self._tell_all(("leave", None))
            self._changed.notify_all()

    def _tell_all(self, message: tuple[str, Any]) -> None:
        for connection in self._connections:
            if connection is not None:
                with contextlib.suppress(OSError):
                    connection.send(message)

    def _dump_stacks(self) -> None:
        """Asks the ranks that still run for the stacks of their threads; they go to their output."""
        before = [outcome.output for outcome in self.outcomes()]
        running = [rank for rank in range(self.world_size) if not self._ended(rank)]
        for rank in running:
            self.signal(rank, signal.SIGUSR2)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline and any(self.outcomes()[rank].output == before[rank] for rank in running):
            with self._changed:
                self._changed.wait(0.1)


def _rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
