"""The emulated cluster: hosts with shaped NICs and one process per device, on one machine."""

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, TextIO

from .goodput import Goodput, measure_goodput
from .job import Job, RankCommand
from .network import (
    DEFAULT_BURST,
    HOST_INTERFACE,
    Network,
    NetworkError,
    check_buffers,
    parse_rate,
    unavailable_reason,
)

_MASTER_PORT = 29500
_LOCAL_ADDRESS = "127.0.0.1"


_ENDING = (signal.SIGTERM, signal.SIGHUP)


class EndingSignals:
    """Turns SIGTERM and SIGHUP, which end a process where it stands, into SystemExit, so that what was built is
    removed; SIGINT does so by itself. Handlers of the program's own are left alone, as are other threads than the
    main one, which alone may have handlers."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in _ENDING:
                if signal.getsignal(number) is signal.SIG_DFL:
                    self._before[number] = signal.signal(number, _exit)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """No signal interrupts what is inside; one that came is heeded after it."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_ENDING, signal.SIGINT))
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def restore(self) -> None:
        """Puts the handlers back. Idempotent."""
        if threading.current_thread() is threading.main_thread():
            for number in list(self._before):
                signal.signal(number, self._before.pop(number))


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


class NotShapedError(RuntimeError):
    """A link was to be cut, slowed or restored on a cluster that runs on plain localhost."""


class EmulatedCluster:
    """`hosts` hosts with `devices` devices each; use it as a context manager.

        with EmulatedCluster(hosts=5, devices=4, rate="200mbit") as cluster:
            job = cluster.run("script.py", "--flag")
            print(cluster.goodput(), job.exit_codes)

    A host is a network namespace with one full-duplex NIC of `rate` bits/s each way (`rate_of={host: rate}` for single
    hosts) and an unshaped loopback; a device is a process; rank = host * devices + local rank. With rate=None, or where
    namespaces cannot be made (no root, no iproute2), all runs on plain localhost: `is_shaped` is False and
    `description` says so and why.

    Owns its processes and its network: leaving the context ends and removes all of it, also on SIGTERM and SIGHUP,
    which become SystemExit until then. What a killed run left behind is removed by the next one. One thread at a time,
    except that `cut`, `slow` and `restore` may be called while another thread waits for a job.

    Raises ValueError for a number of hosts or devices below 1, a host in `rate_of` that does not exist, or a malformed
    rate, burst or tcp_wmem.
    """

    def __init__(
        self,
        *,
        hosts: int,
        devices: int,
        rate: str | None = "200mbit",
        rate_of: Mapping[int, str] | None = None,
        output: TextIO | None = None,
        burst: str = DEFAULT_BURST,
        tcp_wmem: Sequence[int] | None = None,
    ) -> None:
        """`output`: where the ranks' lines go, prefixed with the rank; None keeps them in the handles only.

        What passes unpaced: `burst`, the bytes that a NIC which was idle sends at once (a small one costs CPU), and
        `tcp_wmem`, the least, initial and most bytes of a TCP send buffer (None: as on the machine), in which small
        messages end before they have traveled.
        """
        check_buffers(burst, tcp_wmem)
        if hosts < 1 or devices < 1:
            raise ValueError(f"cluster: expected at least 1 host and 1 device, got hosts={hosts}, devices={devices}")
        if hosts > 253:
            raise ValueError(f"cluster: expected at most 253 hosts (one /24 network), got {hosts}")
        for host, host_rate in (rate_of or {}).items():
            parse_rate(host_rate)
            if not 0 <= host < hosts:
                raise ValueError(f"rate_of: host {host} is not one of the {hosts} hosts")
        self.num_hosts = hosts
        self.num_devices = devices
        self._rate = rate
        self._rate_of = dict(rate_of or {})
        self._output = output
        self._jobs: list[Job] = []
        self._goodput: Goodput | None = None
        self._signals = EndingSignals()
        try:
            self._network, self.unshaped_reason = _build_network(
                hosts, rate=rate, rate_of=self._rate_of, burst=burst, tcp_wmem=tcp_wmem
            )
        except BaseException:
            self._signals.restore()
            raise

    @property
    def world_size(self) -> int:
        return self.num_hosts * self.num_devices

    @property
    def is_shaped(self) -> bool:
        """Whether hosts are namespaces with NICs of the wanted rate; False on plain localhost."""
        return self._network is not None

    @property
    def description(self) -> str:
        """One line for the head of a table."""
        size = f"{self.num_hosts} hosts x {self.num_devices} devices"
        if not self.is_shaped:
            return f"{size}, NOTHING IS SHAPED: plain localhost ({self.unshaped_reason})"
        special = "".join(f", host {host}: {rate}" for host, rate in sorted(self._rate_of.items()))
        return f"{size}, NICs shaped to {self._rate} each way{special} (network namespaces, veth, tbf)"

    def host_of(self, rank: int) -> int:
        return rank // self.num_devices

    def address(self, host: int) -> str:
        """The IPv4 address on which the host's ranks reach other hosts."""
        return self._network.address(host) if self._network else _LOCAL_ADDRESS

    def start(self, *command: str, env: Mapping[str, str] | None = None, stop_on_failure: bool = True) -> Job:
        """Starts `python *command` (a script or `-m module` with its arguments) on every device and returns at once.

        `env` adds to the environment of all ranks. With `stop_on_failure` a rank that fails ends the others, as with
        torchrun.
        """
        port = _MASTER_PORT + len(self._jobs) if self._network else _free_port()
        commands = [self._rank_command(rank, command, port, env or {}) for rank in range(self.world_size)]
        job = Job(commands, stop_on_failure=stop_on_failure, output=self._output)
        self._jobs.append(job)
        return job

    def run(
        self,
        *command: str,
        env: Mapping[str, str] | None = None,
        stop_on_failure: bool = True,
        timeout: float | None = None,
    ) -> Job:
        """`start`, then waits for the end. The returned job holds outputs and exit codes; a failure raises nothing.

        Raises TimeoutError (and stops the job) when ranks still run after `timeout` seconds.
        """
        job = self.start(*command, env=env, stop_on_failure=stop_on_failure)
        try:
            job.wait(timeout)
        except BaseException:
            job.stop()
            raise
        return job

    def _rank_command(self, rank: int, command: tuple[str, ...], port: int, extra: Mapping[str, str]) -> RankCommand:
        host, local_rank = divmod(rank, self.num_devices)
        env = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
        env |= {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.num_devices),
            "GROUP_RANK": str(host),
            "GROUP_WORLD_SIZE": str(self.num_hosts),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.address(0),
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "xmesh-cluster",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "GLOO_SOCKET_IFNAME": HOST_INTERFACE if self._network else "lo",
            "OMP_NUM_THREADS": "1",
        }
        if self._network is None:
            env["XMESH_HOST_ID"] = f"host{host}"
        line = [sys.executable, "-u", *command]
        return RankCommand(
            rank, host, local_rank, self._network.command_on(host, line) if self._network else line, env | dict(extra)
        )

    def goodput(self, *, seconds: float = 1.0) -> Goodput:
        """Measures one TCP stream per ordered pair of hosts, `seconds` each, hosts - 1 streams after one another; keeps
        the result.

        Run it while no job runs. On plain localhost it measures loopback.
        """
        if self._goodput is None:
            network = self._network
            nominal = [network.nic_bits_per_s(host) for host in range(self.num_hosts)] if network else None
            addresses = [self.address(host) for host in range(self.num_hosts)]
            command_on = network.command_on if network else lambda host, command: list(command)
            self._goodput = measure_goodput(addresses, command_on, nominal, seconds=seconds)
        return self._goodput

    def cut(self, host: int) -> None:
        """Pulls the host's cable while jobs run; connections stay and packets are lost. Raises NotShapedError on plain
        localhost."""
        self._shaped_network("cut", host).cut(host)

    def slow(self, host: int, factor: float) -> None:
        """Divides the host's NIC rate by `factor`, both ways. Raises NotShapedError on plain localhost."""
        self._shaped_network("slow", host).slow(host, factor)

    def restore(self, host: int) -> None:
        """Undoes `cut` and `slow`. Raises NotShapedError on plain localhost."""
        self._shaped_network("restore", host).restore(host)

    def _shaped_network(self, action: str, host: int) -> Network:
        if self._network is None:
            raise NotShapedError(
                f"{action}: host {host} has no link of its own on plain localhost ({self.unshaped_reason})"
            )
        if not 0 <= host < self.num_hosts:
            raise ValueError(f"{action}: host {host} is not one of the {self.num_hosts} hosts")
        return self._network

    def close(self) -> None:
        """Ends every job and removes the network; signals wait until that is done. May be called again."""
        with self._signals.held():
            for job in self._jobs:
                job.stop()
            if self._network is not None:
                self._network.close()
            self._signals.restore()

    def __enter__(self) -> "EmulatedCluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _build_network(
    hosts: int, *, rate: str | None, rate_of: Mapping[int, str], burst: str, tcp_wmem: Sequence[int] | None
) -> tuple[Network | None, str | None]:
    """The network, or why there is none."""
    if rate is None:
        return None, "no rate was asked for"
    parse_rate(rate)
    reason = unavailable_reason()
    if reason is None:
        try:
            return Network(hosts, rate, rate_of, burst, tcp_wmem), None
        except NetworkError as error:
            reason = str(error)
    return None, reason


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind((_LOCAL_ADDRESS, 0))
        return int(probe.getsockname()[1])
