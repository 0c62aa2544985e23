"""Hosts as network namespaces whose NICs are shaped veth pairs into a bridge, on one Linux machine.

Every host has one full-duplex NIC: `tc tbf` on the host's end of the veth limits what it sends, on the bridge's end
what it receives. Loopback inside a host is unshaped. The names of a network derive from the process id and start time
of its owner, so that a later run can tell what a dead run left behind (`sweep`) from what a live one uses.
"""

import itertools
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

HOST_INTERFACE = "nic0"
_BRIDGE = "br0"
_SUBNET = "10.77.0"
DEFAULT_BURST = "128kb"  # 32kb costs a whole core in softirq
_QUEUE_LATENCY = "50ms"
_LEAST_MTU, _MOST_MTU = 1500, 65536
_CONGESTION_CONTROL = "cubic"
_NAME = re.compile(r"^xmesh-(?P<pid>\d+)-(?P<start>\d+)-\d+-(h\d+|sw)$")
_RATE = re.compile(r"^(?P<number>\d+(?:\.\d+)?)(?P<unit>[kmg]?)bit$", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_BURST = re.compile(r"^[1-9]\d*(?:[km]?b)?$")
_ETC_NETNS = Path("/etc/netns")
_counter = itertools.count()


class NetworkError(RuntimeError):
    """A command that builds or changes the emulated network failed; the message holds the command and its complaint."""


def parse_rate(rate: str) -> int:
    """Bits per second of a rate as `tc` writes it, such as "200mbit" or "1gbit".

    Raises ValueError when the text is no positive rate.
    """
    match = _RATE.match(rate.strip())
    bits = int(float(match["number"]) * _UNITS[match["unit"].lower()]) if match else 0
    if bits <= 0:
        raise ValueError(f"rate: expected a positive number with kbit, mbit or gbit such as '200mbit', got {rate!r}")
    return bits


def check_buffers(burst: str, tcp_wmem: Sequence[int] | None) -> None:
    """Raises ValueError for a bucket size that `tc` would not read, or send buffers that are not three rising sizes."""
    if not _BURST.match(burst):
        raise ValueError(f"burst: expected a positive number of bytes with kb or mb such as '32kb', got {burst!r}")
    if tcp_wmem is not None and not (len(tcp_wmem) == 3 and 0 < tcp_wmem[0] <= tcp_wmem[1] <= tcp_wmem[2]):
        raise ValueError(
            f"tcp_wmem: expected least, initial and most bytes, none above the next, got {tuple(tcp_wmem)}"
        )


def unavailable_reason() -> str | None:
    """Why shaped networks cannot be built here, or None. Tools and rights only: building may still fail with
    NetworkError."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"needs iproute2: {' and '.join(missing)} not found" if missing else None


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NetworkError(
            f"`{' '.join(command)}` failed with {done.returncode}: {done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout


def _start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]


def _remove_namespace(name: str) -> None:
    """Kills what runs in the namespace and removes it with its /etc/netns folder. A namespace that is gone already is
    fine."""
    listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
    for pid in listed.stdout.split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
    subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
    shutil.rmtree(_ETC_NETNS / name, ignore_errors=True)


def sweep() -> list[str]:
    """Removes the networks of runs that are dead, processes in them included, and returns the names of what it removed.

    A network belongs to a live run while a process with the id and start time in its name exists. Needs root.
    """
    left = set(_namespaces())
    if _ETC_NETNS.is_dir():
        left |= {path.name for path in _ETC_NETNS.iterdir()}
    removed = []
    for name in sorted(left):
        match = _NAME.match(name)
        if match and _start_ticks(int(match["pid"])) != int(match["start"]):
            _remove_namespace(name)
            removed.append(name)
    return removed


class Network:
    """`num_hosts` namespaces and the bridge between them. Owns them: `close()` removes everything. Not thread-safe
    except `cut`, `slow` and `restore` of different hosts."""

    def __init__(
        self,
        num_hosts: int,
        rate: str,
        rate_of: Mapping[int, str],
        burst: str = DEFAULT_BURST,
        tcp_wmem: Sequence[int] | None = None,
    ) -> None:
        """Builds the network; on failure removes what was built and raises NetworkError."""
        sweep()
        pid = os.getpid()
        prefix = f"xmesh-{pid}-{_start_ticks(pid)}-{next(_counter)}"
        self._switch = f"{prefix}-sw"
        self._hosts = [f"{prefix}-h{host}" for host in range(num_hosts)]
        self._bits_per_s = [parse_rate(rate_of.get(host, rate)) for host in range(num_hosts)]
        self._burst = burst
        self._tcp_wmem = tcp_wmem
        try:
            self._build()
        except BaseException:  # a signal among them
            self.close()
            raise

    def _build(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", _BRIDGE, "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", _BRIDGE, "up")
        # c10d asks for the names of IPv4-mapped addresses; without an answer here it waits for a name service that is
        # not there.
        names = [
            f"{prefix}{self.address(host)} host{host}\n"
            for host in range(len(self._hosts))
            for prefix in ("", "::ffff:")
        ]
        hosts_file = "127.0.0.1 localhost\n" + "".join(names)
        for host, name in enumerate(self._hosts):
            port = f"p{host}"
            folder = _ETC_NETNS / name
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(hosts_file)
            (folder / "nsswitch.conf").write_text("hosts: files\n")
            _run("ip", "netns", "add", name)
            _run(
                "ip",
                "link",
                "add",
                HOST_INTERFACE,
                "netns",
                name,
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                self._switch,
            )
            _run("ip", "-n", self._switch, "link", "set", port, "master", _BRIDGE, "up")
            _run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", HOST_INTERFACE)
            _run("ip", "-n", name, "link", "set", HOST_INTERFACE, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            self._set_congestion_control(name, host)
            self._set_send_buffers(name)
            self._shape(host, self._bits_per_s[host])

    def _set_congestion_control(self, name: str, host: int) -> None:
        """Per route, because a namespace's sysctl accepts only what the machine's administrator allows for all of
        them."""
        address = self.address(host)
        remote = (f"{_SUBNET}.0/24", "dev", HOST_INTERFACE, "proto", "kernel", "scope", "link")
        local = ("local", address, "dev", HOST_INTERFACE, "table", "local", "proto", "kernel", "scope", "host")
        for route in (remote, local):
            _run("ip", "-n", name, "route", "replace", *route, "src", address, "congctl", _CONGESTION_CONTROL)

    def _set_send_buffers(self, name: str) -> None:
        if self._tcp_wmem is not None:
            sizes = " ".join(map(str, self._tcp_wmem))
            _run("ip", "netns", "exec", name, "sh", "-c", f"echo {sizes} > /proc/sys/net/ipv4/tcp_wmem")
            # One segment of loopback's usual 64 KiB would fill such a buffer and wait for a delayed acknowledgement.
            mtu = max(_LEAST_MTU, min(_MOST_MTU, self._tcp_wmem[2] // 16))
            _run("ip", "-n", name, "link", "set", "lo", "mtu", str(mtu))

    def _shape(self, host: int, bits_per_s: int) -> None:
        for namespace, device in ((self._hosts[host], HOST_INTERFACE), (self._switch, f"p{host}")):
            rate = f"{bits_per_s}bit"
            _run(
                "tc",
                "-n",
                namespace,
                "qdisc",
                "replace",
                "dev",
                device,
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                self._burst,
                "latency",
                _QUEUE_LATENCY,
            )

    def address(self, host: int) -> str:
        """The host's IPv4 address on the emulated network."""
        return f"{_SUBNET}.{host + 1}"

    def nic_bits_per_s(self, host: int) -> int:
        """The rate that the host's NIC was built with, each way."""
        return self._bits_per_s[host]

    def command_on(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line that runs `command` on the host; the process keeps its id (no intermediate parent)."""
        return ["ip", "netns", "exec", self._hosts[host], *command]

    def cut(self, host: int) -> None:
        """Pulls the host's cable: packets are lost both ways, addresses and connections stay."""
        _run("ip", "-n", self._switch, "link", "set", f"p{host}", "down")

    def slow(self, host: int, factor: float) -> None:
        """Divides the NIC rate that the host was built with by `factor`, both ways."""
        if factor <= 0:
            raise ValueError(f"slow: factor must be positive, got {factor}")
        self._shape(host, max(1, int(self._bits_per_s[host] / factor)))

    def restore(self, host: int) -> None:
        """Undoes `cut` and `slow`."""
        self._shape(host, self._bits_per_s[host])
        _run("ip", "-n", self._switch, "link", "set", f"p{host}", "up")

    def close(self) -> None:
        """Kills what still runs on the hosts and removes the network. May be called again."""
        for name in [*self._hosts, self._switch]:
            _remove_namespace(name)
