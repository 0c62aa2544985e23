"""The processes of one job: one per device of the cluster, with torchrun's environment, their output merged under a
rank prefix."""

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TextIO

_GRACE_SECONDS = 5.0
_READ_BYTES = 1 << 16


@dataclass(frozen=True)
class RankCommand:
    """What to start for one rank: the command line as it runs on its host, and its whole environment."""

    rank: int
    host: int
    local_rank: int
    command: Sequence[str]
    env: Mapping[str, str]


@dataclass
class RankHandle:
    """One rank's process. Owned by its `Job`."""

    rank: int
    host: int
    local_rank: int
    process: "subprocess.Popen[bytes]"
    exit_code: int | None = None
    """None while it runs; 128 + signal number when a signal ended it."""
    _chunks: list[bytes] = field(default_factory=list)
    _partial: bytes = b""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def output(self) -> str:
        """What the rank wrote so far, stdout and stderr as they came."""
        return b"".join(self._chunks).decode(errors="replace")

    def send_signal(self, signal_number: int) -> None:
        """Signals the rank's process; nothing happens when it has ended."""
        self.process.send_signal(signal_number)


class Job:
    """A running or finished job.

    A thread of the job's own reads the output and collects exit codes; it ends with the last rank. Methods may be
    called from any thread. With `stop_on_failure` the other ranks are stopped when one exits with another code than 0,
    as torchrun does. All are stopped when `output` takes no more (a closed pipe, say); `wait` raises what it raised.
    """

    def __init__(self, commands: Sequence[RankCommand], *, stop_on_failure: bool, output: TextIO | None) -> None:
        self._stop_on_failure = stop_on_failure
        self._output = output
        self._condition = threading.Condition()
        self._first_failure: RankHandle | None = None
        self._kill_at: float | None = None
        self._was_killed = False
        self._output_error: Exception | None = None
        self.ranks: list[RankHandle] = []
        try:
            for command in commands:
                self.ranks.append(_start_rank(command))
        except BaseException:
            self._kill_all(signal.SIGKILL)
            for handle in self.ranks:
                handle.process.wait()
            raise
        self._pump = threading.Thread(target=self._pump_until_done, name="cluster-job", daemon=True)
        self._pump.start()

    @property
    def exit_codes(self) -> list[int | None]:
        """One per rank; None where the rank still runs."""
        return [handle.exit_code for handle in self.ranks]

    @property
    def exit_code(self) -> int:
        """0 when every rank ended with 0, else the code of the rank that failed first. Call it on a finished job."""
        return self._first_failure.exit_code or 0 if self._first_failure else 0

    @property
    def failed_rank(self) -> RankHandle | None:
        """The rank that failed first, None when none did."""
        return self._first_failure

    def wait(self, timeout: float | None = None) -> list[int]:
        """Waits for all ranks and returns their exit codes. Raises TimeoutError naming the ranks that still run after
        `timeout` seconds, and what `output` raised when it took no more."""
        codes = self._wait_for_end(timeout)
        if self._output_error is not None:
            raise self._output_error
        return codes

    def _wait_for_end(self, timeout: float | None) -> list[int]:
        with self._condition:
            done = self._condition.wait_for(lambda: all(code is not None for code in self.exit_codes), timeout)
        if not done:
            running = [handle.rank for handle in self.ranks if handle.exit_code is None]
            raise TimeoutError(f"after {timeout} s ranks {running} of {len(self.ranks)} still run")
        self._pump.join()
        return [code for code in self.exit_codes if code is not None]

    def wait_for_output(self, text: str, *, rank: int, timeout: float = 60.0) -> None:
        """Waits until the rank has written `text`. Raises RuntimeError when it ended without, TimeoutError after
        `timeout` seconds."""
        handle = self.ranks[rank]
        with self._condition:
            met = self._condition.wait_for(lambda: text in handle.output or handle.exit_code is not None, timeout)
        if not met:
            raise TimeoutError(f"rank {rank} has not written {text!r} within {timeout} s")
        if text not in handle.output:
            raise RuntimeError(
                f"rank {rank} ended with {handle.exit_code} and never wrote {text!r}; it wrote:\n{handle.output}"
            )

    def stop(self) -> None:
        """Ends what still runs: SIGTERM, and SIGKILL after a grace of 5 seconds. Returns when every rank has ended."""
        self._kill_all(signal.SIGTERM)
        try:
            self._wait_for_end(_GRACE_SECONDS)
        except TimeoutError:
            self._kill_all(signal.SIGKILL)
            self._wait_for_end(None)

    def _kill_all(self, signal_number: int) -> None:
        for handle in self.ranks:
            if handle.exit_code is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(handle.pid, signal_number)

    def _pump_until_done(self) -> None:
        with selectors.DefaultSelector() as selector:
            exits = {}
            for handle in self.ranks:
                assert handle.process.stdout is not None
                os.set_blocking(handle.process.stdout.fileno(), False)
                selector.register(handle.process.stdout, selectors.EVENT_READ, handle)
                exits[handle.rank] = os.pidfd_open(handle.pid)
                selector.register(exits[handle.rank], selectors.EVENT_READ, handle)
            while exits:
                for key, _ in selector.select(self._stop_others()):
                    handle = key.data
                    if key.fileobj is not handle.process.stdout:
                        selector.unregister(key.fileobj)
                        os.close(exits.pop(handle.rank))
                        self._collect(handle)
                    elif not self._read(handle):
                        selector.unregister(key.fileobj)
        for handle in self.ranks:
            assert handle.process.stdout is not None
            handle.process.stdout.close()

    def _stop_others(self) -> float | None:
        """After a failure: SIGTERM at once, SIGKILL when the grace is over. Returns the seconds until that, None when
        nothing is due."""
        has_failed = self._output_error is not None or (self._stop_on_failure and self._first_failure is not None)
        if not has_failed or self._was_killed:
            return None
        if self._kill_at is None:
            self._kill_at = time.monotonic() + _GRACE_SECONDS
            self._kill_all(signal.SIGTERM)
        left = self._kill_at - time.monotonic()
        if left > 0:
            return left
        self._was_killed = True
        self._kill_all(signal.SIGKILL)
        return None

    def _read(self, handle: RankHandle) -> bool:
        """Takes what the rank has written; False at its end."""
        assert handle.process.stdout is not None
        try:
            data = os.read(handle.process.stdout.fileno(), _READ_BYTES)
        except BlockingIOError:
            return True
        with self._condition:
            if data:
                handle._chunks.append(data)
            self._condition.notify_all()
        self._print(handle, data)
        return bool(data)

    def _print(self, handle: RankHandle, data: bytes) -> None:
        if self._output is None:
            return
        lines = (handle._partial + data).split(b"\n")
        handle._partial = lines.pop()
        if not data and handle._partial:
            lines.append(handle._partial)
            handle._partial = b""
        try:
            for line in lines:
                print(f"[rank {handle.rank}] {line.decode(errors='replace')}", file=self._output, flush=True)
        except Exception as error:  # whatever the caller's stream raises must not end the thread that awaits the ranks
            self._output, self._output_error = None, error

    def _collect(self, handle: RankHandle) -> None:
        code = handle.process.wait()
        while self._drain_one(handle):
            pass
        self._print(handle, b"")
        with self._condition:
            handle.exit_code = code if code >= 0 else 128 - code
            if code != 0 and self._first_failure is None:
                self._first_failure = handle
            self._condition.notify_all()

    def _drain_one(self, handle: RankHandle) -> bool:
        """Reads once more from an ended rank; False when nothing is left. (A grandchild may hold the pipe open: its end
        is not awaited.)"""
        before = len(handle._chunks)
        return self._read(handle) and len(handle._chunks) > before


def _start_rank(command: RankCommand) -> RankHandle:
    line = list(command.command)
    # A driver that is killed takes its ranks along. The signal comes when the starting *thread* ends, hence only from
    # the main thread.
    if shutil.which("setpriv") and threading.current_thread() is threading.main_thread():
        line = ["setpriv", "--pdeathsig", "KILL", *line]
    process = subprocess.Popen(
        line,
        env=dict(command.env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    return RankHandle(command.rank, command.host, command.local_rank, process)
