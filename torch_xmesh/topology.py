"""Which host a rank is on and what the links carry."""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_xmesh import _C

_VERSION = 1
_LINK_FIELDS = ("nic_bytes_per_s", "local_bytes_per_s", "latency_us", "message_us", "local_latency_us", "is_measured")
_FIELDS = ("host_of", "devices_per_host", "nic_of_host", *_LINK_FIELDS)


class Topology:
    """Hosts and link speeds, for planning. Two ways to say where ranks are: ``host_of`` or ``devices_per_host``.

    Args:
        host_of: host index of every global rank in use.
        devices_per_host: consecutive global ranks per host, instead of ``host_of``.
        nic_bytes_per_s: rate of a host's network interface each way, bytes per second (full duplex); 12.5e9 if not
            given (100 Gbit/s).
        nic_of_host: other rates for single hosts, by host index, bytes per second.
        local_bytes_per_s: rate between two devices of one host, bytes per second; 200e9 if not given.
        latency_us: first byte between hosts, microseconds one way; 20 if not given.
        message_us: cost of one more message on a network interface, microseconds; 10 if not given.
        local_latency_us: first byte inside a host, microseconds; 5 if not given.
        is_measured: the rates were measured (``python -m torch_xmesh calibrate``); only then are sends paced.

    Raises:
        ValueError: both ``host_of`` and ``devices_per_host`` (with neither, the group discovers the hosts and only the
            links are set), or a rate that is not positive.
    """

    def __init__(
        self,
        host_of: Mapping[int, int] | None = None,
        *,
        devices_per_host: int | None = None,
        nic_bytes_per_s: int | None = None,
        nic_of_host: Mapping[int, int] | None = None,
        local_bytes_per_s: int | None = None,
        latency_us: float | None = None,
        message_us: float | None = None,
        local_latency_us: float | None = None,
        is_measured: bool = False,
    ) -> None:
        if host_of is not None and devices_per_host is not None:
            raise ValueError("give host_of or devices_per_host, not both")
        if devices_per_host is not None and devices_per_host < 1:
            raise ValueError(f"devices_per_host must be positive, got {devices_per_host}")
        self._host_of = None if host_of is None else {int(rank): int(host) for rank, host in host_of.items()}
        self._devices_per_host = devices_per_host
        self._nic_of_host = {int(host): int(rate) for host, rate in (nic_of_host or {}).items()}
        self._links = _C.LinkModel()
        given = {
            "nic_bytes_per_s": nic_bytes_per_s,
            "local_bytes_per_s": local_bytes_per_s,
            "latency_us": latency_us,
            "message_us": message_us,
            "local_latency_us": local_latency_us,
            "is_measured": is_measured,
        }
        for name, value in given.items():
            if value is not None:
                integral = name.endswith("bytes_per_s")
                setattr(self._links, name, int(value) if integral else value)
        self.to_core([])  # checks the rates

    @classmethod
    def from_core(cls, topology: "_C.Topology") -> "Topology":
        """The Python form of a C++ topology."""
        links = {name: getattr(topology.links, name) for name in _LINK_FIELDS}
        return cls(topology.host_of, nic_of_host=topology.nic_of_host, **links)

    @property
    def links(self) -> "_C.LinkModel":
        return self._links

    @property
    def knows_hosts(self) -> bool:
        """Whether it says where ranks are, or only how fast links are."""
        return self._host_of is not None or self._devices_per_host is not None

    def to_core(self, ranks: list[int], discovered: "_C.Topology | None" = None) -> "_C.Topology":
        """The C++ topology of ``ranks``; where this one does not know hosts, they come from ``discovered``."""
        if self._devices_per_host is not None:
            host_of = {rank: rank // self._devices_per_host for rank in ranks}
        elif self._host_of is not None:
            missing = [rank for rank in ranks if rank not in self._host_of]
            if missing:
                raise ValueError(f"the topology names no host for rank {missing[0]}")
            host_of = {rank: self._host_of[rank] for rank in ranks} if ranks else dict(self._host_of)
        else:
            host_of = {} if discovered is None else discovered.host_of
        return _C.Topology(host_of, self._links, self._nic_of_host)

    def _fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"version": _VERSION}
        if self._host_of is not None:
            fields["host_of"] = {str(rank): host for rank, host in sorted(self._host_of.items())}
        if self._devices_per_host is not None:
            fields["devices_per_host"] = self._devices_per_host
        if self._nic_of_host:
            fields["nic_of_host"] = {str(host): rate for host, rate in sorted(self._nic_of_host.items())}
        return fields | {name: getattr(self._links, name) for name in _LINK_FIELDS}

    def to_json(self) -> str:
        """One JSON object with the constructor's arguments and a ``version``."""
        return json.dumps(self._fields(), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Topology":
        """Reads :meth:`to_json`. Raises ValueError naming what is wrong."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"topology: not JSON: {error}") from None
        if not isinstance(fields, dict) or fields.pop("version", None) != _VERSION:
            raise ValueError(f"topology: expected an object with version {_VERSION}")
        for name in fields:
            if name not in _FIELDS:
                close = difflib.get_close_matches(name, _FIELDS, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(_FIELDS)}"
                raise ValueError(f"topology: unknown field {name!r}; {hint}")
        for name in ("host_of", "nic_of_host"):
            if name in fields:
                fields[name] = _by_integer(name, fields[name])
        try:
            return cls(**fields)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"topology: {error}") from None

    def save(self, path: str | Path) -> None:
        """Writes :meth:`to_json` to a file."""
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Topology":
        """Reads a file that :meth:`save` or ``python -m torch_xmesh calibrate`` wrote.

        Raises:
            OSError: it cannot be read.
            ValueError: what is wrong in it.
        """
        return cls.from_json(Path(path).read_text())

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Topology.from_json, (self.to_json(),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Topology) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __repr__(self) -> str:
        return f"Topology({self._fields()})"


def _by_integer(name: str, values: Any) -> dict[int, int]:
    """JSON spells integer keys as text. Raises ValueError naming the field."""
    try:
        return {int(key): int(value) for key, value in values.items()}
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"topology: {name} must be an object from integers to integers, got {values!r}") from None
