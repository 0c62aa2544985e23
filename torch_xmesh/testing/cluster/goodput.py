"""What one TCP stream carries between two hosts of the emulated cluster: the rate that a lower bound has to use."""

import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PROBE = str(Path(__file__).with_name("goodput_probe.py"))


@dataclass(frozen=True)
class Goodput:
    """Measured payload rates. `pairs[(src, dst)]` is the rate from host to host in bytes/s; `nic_bytes_per_s[host]` is
    what the host's NIC carries one way: its nominal rate times the largest measured / nominal of any pair, since a
    disturbance of the machine only ever lowers one (without nominal rates, the largest of any pair)."""

    pairs: Mapping[tuple[int, int], float]
    nic_bytes_per_s: Sequence[float]

    def __str__(self) -> str:
        if not self.pairs:
            return "no pair of hosts to measure"
        mbit = [rate * 8e-6 for rate in self.pairs.values()]
        spread = f"median {statistics.median(mbit):.1f}, least {min(mbit):.1f}"
        return f"{max(mbit):.1f} Mbit/s ({max(mbit) / 8:.2f} MB/s), the most of {len(mbit)} one-stream pairs ({spread})"


def measure_goodput(
    addresses: Sequence[str],
    command_on: Callable[[int, Sequence[str]], list[str]],
    nominal_bits_per_s: Sequence[int] | None,
    *,
    seconds: float,
) -> Goodput:
    """Sends one stream per ordered pair of hosts, in rounds in which every host sends to one host and receives from
    one.

    Raises RuntimeError when a probe fails.
    """
    num_hosts = len(addresses)
    probe = [sys.executable, "-I", "-S", _PROBE]
    receivers = [
        subprocess.Popen(
            command_on(h, [*probe, "receive", addresses[h], str(num_hosts - 1)]), stdout=subprocess.PIPE, text=True
        )
        for h in range(num_hosts)
    ]
    try:
        ports = [_read_port(receiver) for receiver in receivers]
        pairs: dict[tuple[int, int], float] = {}
        for shift in range(1, num_hosts):
            targets = [(host + shift) % num_hosts for host in range(num_hosts)]
            senders = [
                subprocess.Popen(
                    command_on(h, [*probe, "send", addresses[t], addresses[h], str(ports[t]), str(seconds)])
                )
                for h, t in enumerate(targets)
            ]
            for host, sender in enumerate(senders):
                if sender.wait() != 0:
                    raise RuntimeError(
                        f"goodput: the stream from host {host} to host {targets[host]} failed with {sender.returncode}"
                    )
            for host, target in enumerate(targets):
                pairs[(host, target)] = _read_rate(receivers[target], host, target)
    finally:
        for receiver in receivers:
            receiver.kill()
            receiver.wait()
            if receiver.stdout is not None:
                receiver.stdout.close()
    return Goodput(pairs, nic_rates(pairs, nominal_bits_per_s, num_hosts))


def _read_line(receiver: "subprocess.Popen[str]", what: str) -> list[str]:
    line = receiver.stdout.readline().split() if receiver.stdout is not None else []
    if len(line) != 2:
        raise RuntimeError(f"goodput: the receiving probe ended before it reported {what}")
    return line


def _read_port(receiver: "subprocess.Popen[str]") -> int:
    return int(_read_line(receiver, "its port")[1])


def _read_rate(receiver: "subprocess.Popen[str]", src: int, dst: int) -> float:
    return float(_read_line(receiver, f"the stream from host {src} to host {dst}")[1])


def nic_rates(
    pairs: Mapping[tuple[int, int], float], nominal_bits_per_s: Sequence[int] | None, num_hosts: int
) -> list[float]:
    """What each host's NIC carries one way, bytes/s (see :class:`Goodput`)."""
    if not pairs:
        return [bits / 8 for bits in nominal_bits_per_s] if nominal_bits_per_s else []
    if nominal_bits_per_s is None:
        return [max(pairs.values())] * num_hosts
    nominal = [bits / 8 for bits in nominal_bits_per_s]
    efficiency = max(rate / min(nominal[src], nominal[dst]) for (src, dst), rate in pairs.items())
    return [efficiency * rate for rate in nominal]
