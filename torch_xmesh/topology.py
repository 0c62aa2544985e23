"""Which host a rank is on and what the links carry."""

import difflib
import json
import numbers
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_xmesh import _C
from torch_xmesh.arguments import instance_of, read_text

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
        is_measured: the rates were measured (``xmesh calibrate``); only then are sends paced.

    Raises:
        ValueError: both ``host_of`` and ``devices_per_host`` (with neither, the group discovers the hosts and only the
            links are set), a rate that is not positive, a rate of a host that ``host_of`` does not have, or what is no
            number.
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
        if devices_per_host is not None and _integer("devices_per_host", devices_per_host) < 1:
            raise ValueError(f"devices_per_host must be positive, got {devices_per_host}")
        self._host_of = None if host_of is None else _integers("host_of", host_of)
        self._devices_per_host = None if devices_per_host is None else int(devices_per_host)
        rate_of = _mapping("nic_of_host", {} if nic_of_host is None else nic_of_host)
        self._nic_of_host = {
            _integer("a host in nic_of_host", host): int(_number(f"nic_of_host[{host!r}]", rate))
            for host, rate in rate_of.items()
        }
        self._links = _C.LinkModel()
        rates = {"nic_bytes_per_s": nic_bytes_per_s, "local_bytes_per_s": local_bytes_per_s}
        times = {"latency_us": latency_us, "message_us": message_us, "local_latency_us": local_latency_us}
        for name, value in (rates | times).items():
            if value is not None:
                setattr(self._links, name, int(_number(name, value)) if name in rates else _number(name, value))
        if not isinstance(is_measured, bool):
            raise ValueError(f"is_measured is True or False, got {is_measured!r} ({type(is_measured).__name__})")
        self._links.is_measured = is_measured
        self._check_hosts()
        self.to_core([])  # checks the rates

    @classmethod
    def from_core(cls, topology: "_C.Topology") -> "Topology":
        """The Python form of a C++ topology, which may have rates of more hosts than its ranks are on."""
        links = {name: getattr(topology.links, name) for name in _LINK_FIELDS}
        hosts = set(topology.host_of.values())
        rates = {host: rate for host, rate in topology.nic_of_host.items() if host in hosts}
        return cls(topology.host_of, nic_of_host=rates, **links)

    def _check_hosts(self) -> None:
        """A rate is some host's, as far as hosts are known."""
        for host in self._nic_of_host:
            if host < 0:
                raise ValueError(f"a host in nic_of_host is not negative, got {host}")
            if self._host_of is not None and host not in self._host_of.values():
                known = sorted(set(self._host_of.values()))
                raise ValueError(f"nic_of_host names host {host}, host_of has hosts {known}")

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
            fields = json.loads(instance_of("text", text, str, "a topology as JSON text"), object_pairs_hook=_distinct)
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
        except (TypeError, ValueError) as error:
            raise ValueError(f"topology: {error}") from None

    def save(self, path: str | Path) -> None:
        """Writes :meth:`to_json` to a file."""
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Topology":
        """Reads a file that :meth:`save` or ``xmesh calibrate`` wrote.

        Raises:
            OSError: it cannot be read.
            ValueError: what is wrong in it.
        """
        return cls.from_json(read_text(path, "a topology"))

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return Topology.from_json, (self.to_json(),)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Topology) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self.to_json())

    def __repr__(self) -> str:
        return f"Topology({self._fields()})"


def _integer(what: str, value: Any) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{what} must be an integer, got {value!r} ({type(value).__name__})") from None


def _mapping(what: str, values: Any) -> Mapping[Any, Any]:
    if not isinstance(values, Mapping):
        raise ValueError(f"{what} must be a mapping, got {values!r} ({type(values).__name__})")
    return values


def _integers(what: str, values: Any) -> dict[int, int]:
    pairs = _mapping(what, values).items()
    return {_integer(f"a key of {what}", key): _integer(f"{what}[{key!r}]", value) for key, value in pairs}


def _number(what: str, value: Any) -> float:
    """Returns a rate or a time; raises ValueError unless it is a finite number. C++ checks the lower bounds."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not abs(value) < 1 << 63:
        raise ValueError(f"{what} must be a finite number, got {value!r} ({type(value).__name__})")
    return value  # type: ignore[no-any-return]


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object's fields, each of which is there once."""
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"topology: {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return out


def _by_integer(name: str, values: Any) -> dict[int, Any]:
    """JSON spells integer keys as text. Raises ValueError naming the field."""
    try:
        out = {int(key): value for key, value in values.items()}
    except (AttributeError, TypeError, ValueError):
        raise ValueError(f"topology: {name} must be an object from integers to integers, got {values!r}") from None
    if len(out) < len(values):
        raise ValueError(f"topology: {name} has a key twice, in several spellings, got {values!r}")
    return out
