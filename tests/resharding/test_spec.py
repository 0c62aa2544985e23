"""Meshes, specs, topologies and strategies as values: what they accept, refuse, and keep through pickle."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import torch_xmesh as xm
from torch_xmesh import _C
from torch_xmesh.spec import mesh_grid, normal_placements, placement_of, placement_text

GRID = [[0, 1], [2, 3]]
PLACEMENTS: list[Placement] = [
    Replicate(),
    Shard(0),
    Shard(3),
    _StridedShard(1, split_factor=4),
    *(Partial(op) for op in ("sum", "avg", "min", "max", "product")),
]


def copies(value: Any) -> list[Any]:
    return [pickle.loads(pickle.dumps(value)), copy.copy(value), copy.deepcopy(value)]


@pytest.mark.parametrize("ranks", [GRID, np.array(GRID), torch.tensor(GRID), torch.tensor(GRID, dtype=torch.int8)])
def test_mesh_from_any_array(ranks: Any) -> None:
    mesh = xm.Mesh(ranks)
    assert (mesh.shape, mesh.ranks) == ((2, 2), (0, 1, 2, 3))
    assert mesh == xm.Mesh(GRID)
    assert hash(mesh) == hash(xm.Mesh(GRID))
    assert repr(mesh) == "Mesh([[0, 1], [2, 3]])"
    assert all(twin == mesh for twin in copies(mesh))


def test_meshes_differ_in_order_and_shape() -> None:
    assert len({xm.Mesh([0, 1]), xm.Mesh([1, 0]), xm.Mesh([[0, 1]]), xm.Mesh([[0], [1]]), xm.Mesh(range(2))}) == 4
    assert xm.Mesh([0, 1]) != [0, 1]


def test_names_of_axes_are_no_part_of_a_mesh() -> None:
    named, plain = xm.Mesh(GRID, axis_names=("dp", "tp")), xm.Mesh(GRID)
    assert (named, hash(named)) == (plain, hash(plain))
    assert (named.axis_names, plain.axis_names) == (("dp", "tp"), None)
    assert repr(named) == "Mesh([[0, 1], [2, 3]], axis_names=('dp', 'tp'))"
    assert [(twin, twin.axis_names) for twin in copies(named)] == [(named, ("dp", "tp"))] * 3
    assert mesh_grid(named).axis_names is None


@pytest.mark.parametrize(
    ("names", "pattern"),
    [
        (("dp",), "2 axes has as many distinct names"),
        (("dp", "dp"), "2 axes has as many distinct names"),
        ("dp", "sequence of strings"),
        ((0, 1), "sequence of strings"),
        (2, "sequence of strings"),
    ],
)
def test_mesh_refuses_names(names: Any, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        xm.Mesh(GRID, axis_names=names)


@pytest.mark.parametrize(
    ("ranks", "pattern"),
    [
        ([0, 0], "distinct"),
        ([-1, 2], "not negative"),
        ([[0, 1], [2]], "array of integers"),
        ([0.0, 1.0], "array of integers, got torch.float32"),
        ([True, False], "array of integers"),
        ("ab", "array of integers"),
        (None, "array of integers"),
        ([1 << 70], "array of integers"),
    ],
)
def test_mesh_refuses(ranks: Any, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        xm.Mesh(ranks)


def test_device_mesh_counts_as_its_ranks() -> None:
    """Only the ranks of a DeviceMesh are read: it needs no process group."""
    mesh = DeviceMesh("cpu", torch.tensor(GRID), mesh_dim_names=("pp", "dp"), _init_backend=False, _rank=0)
    assert mesh_grid(mesh) == xm.Mesh(GRID)
    assert xm.stage_meshes(mesh, "pp") == [xm.Mesh([0, 1]), xm.Mesh([2, 3])]
    assert xm.stage_meshes(mesh, -1) == [xm.Mesh([0, 2]), xm.Mesh([1, 3])]
    assert [[m.axis_names for m in xm.stage_meshes(mesh, axis)] for axis in (0, -1)] == [[("dp",)] * 2, [("pp",)] * 2]
    assert xm.stage_meshes(xm.stage_meshes(mesh, "pp")[1], "dp") == [xm.Mesh(2), xm.Mesh(3)]
    assert xm.stage_meshes(xm.Mesh(GRID), 1)[0].axis_names is None
    for axis in ("tp", 2, -3):
        with pytest.raises(ValueError, match="axis"):
            xm.stage_meshes(mesh, axis)
    assert xm.device_mesh(mesh) is mesh


def test_spec_is_a_value() -> None:
    spec = xm.Spec((4, 6), torch.float32, xm.Mesh(GRID), [Shard(-1), Replicate()])
    assert spec.shape == torch.Size((4, 6))
    assert spec.placements == (Shard(1), Replicate())
    same = xm.Spec([4, 6], torch.float32, xm.Mesh(GRID), (Shard(1), Replicate()))
    assert (spec, hash(spec)) == (same, hash(same))
    assert all((twin, hash(twin)) == (spec, hash(spec)) for twin in copies(spec))
    others = [
        xm.Spec((4, 7), torch.float32, xm.Mesh(GRID), spec.placements),
        xm.Spec((4, 6), torch.float64, xm.Mesh(GRID), spec.placements),
        xm.Spec((4, 6), torch.float32, xm.Mesh([[1, 0], [2, 3]]), spec.placements),
        xm.Spec((4, 6), torch.float32, xm.Mesh(GRID), (Replicate(), Shard(1))),
        xm.Spec((4, 6), torch.float32, xm.Mesh(GRID), (_StridedShard(1, split_factor=2), Replicate())),
        xm.Spec((4, 6), torch.float32, xm.Mesh(GRID), spec.placements, requires_grad=True),
    ]
    assert len({spec, *others}) == 7
    assert others[-1].without_grad() == spec
    assert (
        repr(spec) == "Spec((4, 6), torch.float32, mesh=Mesh([[0, 1], [2, 3]]), placements=(Shard(dim=1), Replicate()))"
    )


@pytest.mark.parametrize(
    ("change", "pattern"),
    [
        ({"placements": [Shard(0)]}, "one placement per mesh axis"),
        ({"placements": Shard(0)}, "sequence with one placement per mesh axis"),
        ({"placements": [Shard(2), Replicate()]}, "out of range for a tensor of 2 dims"),
        ({"placements": [Shard(-3), Replicate()]}, "out of range for a tensor of 2 dims"),
        ({"placements": [0, Replicate()]}, "cannot be resharded"),
        ({"placements": [Partial("norm"), Replicate()]}, "expected one of sum, avg, min, max, product"),
        ({"placements": [Partial("sum"), Partial("max")]}, "Partial"),
        ({"placements": [Partial("sum"), Replicate()], "dtype": torch.bool}, "Partial|bool"),
        ({"mesh": GRID}, "DeviceMesh or an xm.Mesh"),
        ({"dtype": "float32"}, "torch.dtype"),
        ({"shape": (4, -1)}, "negative|-1"),
        ({"shape": (1,) * 9}, "8 dims"),
        ({"shape": (1 << 80, 2)}, "integers of 64 bits"),
        ({"shape": (1.5, 2)}, "must be integers"),
        ({"shape": 4}, "must be integers"),
        ({"shape": (1 << 40, 1 << 40)}, "bytes|large|overflow|elements"),
    ],
)
def test_spec_refuses(change: dict[str, Any], pattern: str) -> None:
    fields: dict[str, Any] = {
        "shape": (4, 6),
        "dtype": torch.float32,
        "mesh": xm.Mesh(GRID),
        "placements": [Shard(0), Replicate()],
    }
    with pytest.raises(ValueError, match=pattern):
        xm.Spec(**(fields | change))


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_placements_travel_as_text(placement: Placement) -> None:
    assert placement_of(placement_text(placement)) == placement
    assert type(placement_of(placement_text(placement))) is type(placement)
    assert normal_placements([placement], 4) == (placement,)


def _has_tensors(dtype: torch.dtype) -> bool:
    """Quantized dtypes aside, which need more than a dtype; of some torch has the name only."""
    try:
        torch.empty((), dtype=dtype)
    except RuntimeError:
        return False
    return not str(dtype).startswith("torch.q")


DTYPES = sorted(
    {value for value in vars(torch).values() if isinstance(value, torch.dtype) and _has_tensors(value)}, key=str
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_of_torch_has_its_size(dtype: torch.dtype) -> None:
    spec = xm.Spec((3, 5), dtype, xm.Mesh([0, 1]), [Shard(0)])
    assert spec.to_core().num_bytes == 15 * torch.empty((), dtype=dtype).element_size()


def test_local_shapes_follow_torch_chunk() -> None:
    for extent in range(8):
        spec = xm.Spec((extent, 3), torch.float32, xm.Mesh([5, 1, 4]), [Shard(0)]).to_core()
        chunks = [tuple(chunk.shape) for chunk in torch.empty(extent, 3).chunk(3)] if extent else []
        expected = [*chunks, *[(0, 3)] * (3 - len(chunks))]
        assert [tuple(spec.local_shape(rank) or ()) for rank in (5, 1, 4)] == expected
        assert spec.local_shape(0) is None


LINKS = {
    "nic_bytes_per_s": 10**9,
    "local_bytes_per_s": 10**10,
    "latency_us": 12.5,
    "message_us": 3.0,
    "local_latency_us": 1.0,
    "is_measured": True,
}


def test_topology_is_a_value(tmp_path: Path) -> None:
    topology = xm.Topology({0: 7, 1: 7, 4: 2}, nic_of_host={2: 5 * 10**8}, **LINKS)  # type: ignore[arg-type]
    assert all((twin, hash(twin)) == (topology, hash(topology)) for twin in copies(topology))
    assert topology != xm.Topology({0: 7, 1: 7, 4: 2})
    topology.save(tmp_path / "topology.json")
    assert xm.Topology.load(tmp_path / "topology.json") == topology
    core = topology.to_core([0, 4])
    assert (core.host_of, core.nic_of_host) == ({0: 7, 4: 2}, {2: 5 * 10**8})
    for name, value in LINKS.items():
        assert getattr(core.links, name) == value
    assert xm.Topology.from_core(topology.to_core([0, 1, 4])) == topology


def test_topology_of_consecutive_ranks() -> None:
    topology = xm.Topology(devices_per_host=4)
    assert topology.to_core([0, 3, 4, 11]).host_of == {0: 0, 3: 0, 4: 1, 11: 2}
    assert topology.knows_hosts
    assert not xm.Topology(latency_us=3).knows_hosts


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (lambda: xm.Topology({0: 0}, devices_per_host=1), "not both"),
        (lambda: xm.Topology(devices_per_host=0), "positive"),
        (lambda: xm.Topology({0: 0}, nic_bytes_per_s=0), "nic_bytes_per_s|positive"),
        (lambda: xm.Topology({0: 0}, nic_of_host={0: -1}), "positive"),
        (lambda: xm.Topology({-1: 0}), "rank|negative"),
        (lambda: xm.Topology({0: -2}), "host|negative"),
        (lambda: xm.Topology({0: 0}).to_core([0, 3]), "no host for rank 3"),
        (lambda: xm.Topology([0, 1]), r"host_of must be a mapping, got \[0, 1\] \(list\)"),  # type: ignore[arg-type]
        (lambda: xm.Topology({0.5: 0}), r"a key of host_of must be an integer, got 0.5 \(float\)"),  # type: ignore[dict-item]
        (lambda: xm.Topology({0: True}), r"host_of\[0\] must be an integer, got True \(bool\)"),
        (lambda: xm.Topology(devices_per_host=1.5), r"devices_per_host must be an integer, got 1.5"),  # type: ignore[arg-type]
        (lambda: xm.Topology(devices_per_host=True), r"devices_per_host must be an integer, got True"),
        (lambda: xm.Topology(nic_bytes_per_s=float("inf")), r"nic_bytes_per_s must be a finite number, got inf"),  # type: ignore[arg-type]
        (lambda: xm.Topology(local_bytes_per_s="1e9"), r"local_bytes_per_s must be a finite number, got '1e9'"),  # type: ignore[arg-type]
        (lambda: xm.Topology(latency_us=float("nan")), r"latency_us must be a finite number, got nan"),
        (lambda: xm.Topology(message_us=float("inf")), r"message_us must be a finite number, got inf"),
        (lambda: xm.Topology(local_latency_us=-1.0), r"cannot be negative"),
        (lambda: xm.Topology(is_measured="yes"), r"is_measured is True or False, got 'yes'"),  # type: ignore[arg-type]
        (lambda: xm.Topology(nic_of_host={-1: 5}), r"a host in nic_of_host is not negative, got -1"),
        (lambda: xm.Topology(nic_of_host={0: float("nan")}), r"nic_of_host\[0\] must be a finite number"),  # type: ignore[dict-item]
        (lambda: xm.Topology({0: 0, 1: 1}, nic_of_host={2: 5}), r"names host 2, host_of has hosts \[0, 1\]"),
        (lambda: xm.Topology.from_json("{"), "not JSON"),
        (lambda: xm.Topology.from_json("[]"), "version 1"),
        (lambda: xm.Topology.from_json('{"version": 2}'), "version 1"),
        (lambda: xm.Topology.from_json('{"version": 1, "speed": 3}'), "speed"),
        (lambda: xm.Topology.from_json('{"version": 1, "host_of": [0, 1]}'), "host_of must be an object"),
        (lambda: xm.Topology.from_json('{"version": 1, "host_of": {"a": 1}}'), "host_of must be an object"),
        (lambda: xm.Topology.from_json('{"version": 1, "latency_us": "much"}'), "topology: latency_us must be"),
        (lambda: xm.Topology.from_json('{"version": 1, "latency_us": NaN}'), "topology: latency_us must be"),
        (
            lambda: xm.Topology.from_json('{"version": 1, "host_of": {"0": 0.5}}'),
            r"topology: host_of\[0\] must be an integer",
        ),
        (lambda: xm.Topology.from_json('{"version": 1, "host_of": {"0": 0, "00": 1}}'), "has a key twice"),
        (lambda: xm.Topology.from_json('{"version": 1, "host_of": {"0": 0, "0": 1}}'), "'0' is there twice"),
        (
            lambda: xm.Topology.from_json('{"version": 1, "nic_of_host": {"0": 1e400}}'),
            r"nic_of_host\[0\] must be a finite",
        ),
    ],
)
def test_topology_refuses(make: Callable[[], Any], pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        make()


def test_topology_json_has_every_field() -> None:
    fields = json.loads(xm.Topology(devices_per_host=2).to_json())
    assert fields == {"version": 1, "devices_per_host": 2} | {name: fields[name] for name in LINKS}


@pytest.mark.parametrize(
    ("strategy", "canonical"),
    [
        (xm.Broadcast(), "broadcast"),
        (xm.Broadcast("naive", "naive"), "broadcast:naive+naive"),
        (xm.Broadcast(order="dfs", seed=3, node_budget=100), "broadcast:size+dfs,seed=3,node_budget=100"),
        (xm.Broadcast(collective=True), "broadcast:collective=1"),
        ("broadcast:size+best", "broadcast"),
        ("auto", "auto"),
    ],
)
def test_one_spelling_per_strategy(strategy: object, canonical: str) -> None:
    assert _C.canonical_strategy(str(strategy)) == canonical
    assert _C.canonical_strategy(canonical) == canonical


@pytest.mark.parametrize(
    "text",
    ["", "fastest", "broadcast:fast", "broadcast:size+best+more", "send_recv:naive", "broadcast:seed=x", "auto:x"],
)
def test_unknown_strategies_name_the_known_ones(text: str) -> None:
    with pytest.raises(ValueError, match=r"strategy|broadcast"):
        _C.canonical_strategy(text)


def test_peer_error_travels() -> None:
    error = xm.PeerError("rank 3 is lost", [3])
    twin = pickle.loads(pickle.dumps(error))
    assert (str(twin), twin.ranks) == ("rank 3 is lost", (3,))
    assert isinstance(error, RuntimeError)


def test_parts_of_a_mesh() -> None:
    mesh = xm.Mesh([[[0, 1], [2, 3]], [[4, 5], [6, 7]]], axis_names=("pp", "dp", "tp"))
    assert (mesh.ndim, mesh.size(), mesh.size("tp"), mesh.size(-3), mesh.shape) == (3, 8, 2, 2, (2, 2, 2))
    assert repr(mesh[1]) == "Mesh([[4, 5], [6, 7]], axis_names=('dp', 'tp'))"
    assert mesh[:, 0].axis_names == ("pp", "tp")
    assert mesh[:, 0] == xm.Mesh([[0, 1], [4, 5]])
    assert mesh[-1, 1, 0].ranks == (6,)
    assert mesh[0:1].shape == (1, 2, 2)
    assert mesh.through(6, "dp") == xm.Mesh([4, 6])
    assert mesh.through(6, "tp", "pp") == mesh.through(6, 0, 2) == xm.Mesh([[2, 3], [6, 7]])
    assert mesh.through(3).ranks == (3,)
    mistakes: list[tuple[Callable[[], Any], str]] = [
        (lambda: mesh["tp"], r"this process has no rank in Mesh.*through\(rank"),
        (lambda: mesh[2], "no part"),
        (lambda: mesh[0, 0, 0, 0], "at most 3"),
        (lambda: mesh[0.5], "integers or slices"),
        (lambda: mesh.size("ep"), "no axis 'ep'"),
        (lambda: mesh.size(3), "axis 3 is out of range"),
        (lambda: mesh.through(9, "tp"), "rank 9 is not in"),
    ]
    for wrong, pattern in mistakes:
        with pytest.raises(ValueError, match=pattern):
            wrong()


def test_a_mesh_of_a_mesh() -> None:
    named = xm.Mesh([[0, 1], [2, 3]], axis_names=("dp", "tp"))
    assert xm.Mesh(named).axis_names == ("dp", "tp")
    assert xm.Mesh(named, axis_names=("a", "b")).axis_names == ("a", "b")
    of_torch = DeviceMesh("cpu", [[4, 5], [6, 7]], mesh_dim_names=("x", "y"), _init_backend=False, _rank=0)
    assert repr(xm.Mesh(of_torch)) == "Mesh([[4, 5], [6, 7]], axis_names=('x', 'y'))"
    assert hash(xm.Mesh(of_torch)) == hash(xm.Mesh([[4, 5], [6, 7]]))
