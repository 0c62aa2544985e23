"""Containers of tensors: compared by name, nested, with other entries passed through, with a mesh per tensor."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import Placements, assert_same_bytes, dtensor_of, local_part
from torch.distributed.tensor import DTensor, Replicate, Shard

import torch_xmesh as xm
from torch_xmesh.group import group_of
from torch_xmesh.testing import spawn

FRONT, BACK = xm.Mesh([0, 1]), xm.Mesh([2, 3])
REPLICATED: Placements = (Replicate(),)


def whole(name: str) -> torch.Tensor:
    return torch.arange(12.0).reshape(4, 3) + 100 * len(name)


def tensor(name: str, rank: int) -> DTensor:
    return dtensor_of(local_part(whole(name), FRONT, (Shard(0),), rank), (4, 3), FRONT, (Shard(0),))


def check(y: DTensor, name: str, rank: int, mesh: xm.Mesh = BACK, placements: Placements = REPLICATED) -> None:
    assert_same_bytes(y.to_local(), local_part(whole(name), mesh, placements, rank), name)


NAMES = ["w", "bb", "ccc"]


def order_of_a_dict_does_not_matter(rank: int, world_size: int) -> None:
    names = NAMES[rank % 3 :] + NAMES[: rank % 3]
    moved = xm.reshard_many({name: tensor(name, rank) for name in names}, BACK, REPLICATED)
    assert list(moved) == names
    for name in NAMES:
        check(moved[name], name, rank)
    placements = {name: (Shard(len(name) % 2),) for name in reversed(names)}
    outs = xm.reshard_many(OrderedDict((name, tensor("zero", rank)) for name in names), BACK, placements)
    held = {name: outs[name].to_local() for name in names}
    again = xm.reshard_many({n: tensor(n, rank) for n in names}, BACK, placements, out={n: outs[n] for n in NAMES})
    for name in NAMES:
        assert again[name] is outs[name]
        assert again[name].to_local().data_ptr() == held[name].data_ptr()
        check(again[name], name, rank, placements=placements[name])


def ranks_that_name_other_things(rank: int, world_size: int) -> None:
    a, b = tensor("w", rank), tensor("bb", rank)
    cases: list[tuple[str, Callable[[], Any], Callable[[], Any]]] = [
        (r"entry \['[bc]'\]: rank \d has it, rank \d has not", lambda: {"a": a, "b": b}, lambda: {"a": a, "c": b}),
        (r"entry \['b'\]: rank \d has it", lambda: {"a": a, "b": b}, lambda: {"a": a}),
        (r"container: rank \d has a (dict|list), rank", lambda: {"a": a, "b": b}, lambda: [a, b]),
        (r"container: rank \d has a (dict|list), rank", lambda: [a, b], lambda: {0: a, 1: b}),
        (r"entry \['x'\](\['b'\]|\[\d\]): rank \d has it", lambda: {"x": {"b": b}}, lambda: {"x": [1, b]}),
        (r"entry \['n'\]: rank \d has (int|str), rank", lambda: {"a": a, "n": 1}, lambda: {"a": a, "n": "1"}),
        (r"entry \['b'\]: rank \d has (a tensor|int), rank", lambda: {"a": a, "b": b}, lambda: {"a": a, "b": 1}),
    ]
    for pattern, right, wrong in cases:
        with pytest.raises(ValueError, match=rf"ranks disagree on {pattern}"):
            xm.reshard_many(wrong() if rank == 2 else right(), BACK, REPLICATED)
        check(xm.reshard_many({"w": tensor("w", rank)}, BACK, REPLICATED)["w"], "w", rank)
    odd = {"a": a, "b": xm.Spec((5, 3), torch.float32, FRONT, (Shard(0),))}
    with pytest.raises(ValueError, match=r"ranks disagree on shape of tensor \['b'\]: rank \d has"):
        xm.reshard_many(odd if rank == 2 else {"b": b, "a": a}, BACK, REPLICATED)


def nested_with_other_entries(rank: int, world_size: int) -> None:
    """A state dict: dicts and lists in it, entries that are no tensors, a mesh and placements per branch."""
    marker = object()
    state: dict[Any, Any] = {
        "model": {"w": tensor("w", rank), "blocks": [tensor("bb", rank), {"deep": tensor("ccc", rank)}]},
        "step": rank,
        "extra": (None, "name", {"o": marker}),
        7: tensor("four", rank),
    }
    if rank % 2:
        state = {key: state[key] for key in reversed(state)}
    meshes = {"model": {"w": BACK, "blocks": xm.Mesh([[1, 3]])}, 7: xm.Mesh([3])}
    placements = {
        "model": {"blocks": [(Replicate(), Shard(0)), [Replicate(), Shard(1)]], "w": [Shard(1)]},
        7: [Shard(0)],
    }
    moved = xm.reshard_many(MappingProxyType(state), meshes, placements)
    assert list(moved) == list(state)
    assert moved["step"] == rank
    assert moved["extra"][:2] == (None, "name")
    assert moved["extra"][2]["o"] is marker
    model = moved["model"]
    check(model["w"], "w", rank, BACK, (Shard(1),))
    check(model["blocks"][0], "bb", rank, xm.Mesh([[1, 3]]), (Replicate(), Shard(0)))
    check(model["blocks"][1]["deep"], "ccc", rank, xm.Mesh([[1, 3]]), (Replicate(), Shard(1)))
    check(moved[7], "four", rank, xm.Mesh([3]), (Shard(0),))


def gradients_by_name(rank: int, world_size: int) -> None:
    xs = {name: tensor(name, rank).requires_grad_() for name in (NAMES if rank else NAMES[::-1])}
    ys, work = xm.reshard_many(xs, BACK, REPLICATED, async_op=True)
    work.wait()
    loss: Any = torch.stack([ys[name].to_local().sum() * len(name) for name in NAMES]).sum()
    loss.backward()
    for name, x in xs.items():
        gradient = x.grad
        assert isinstance(gradient, DTensor)
        if rank in FRONT.ranks:
            assert torch.equal(gradient.to_local(), torch.full((2, 3), float(len(name))))


def collectives_on_a_mesh_without_groups(rank: int, world_size: int) -> None:
    """What torch says of a result whose mesh is only ranks; with a DeviceMesh that has groups it works."""
    y = xm.reshard(tensor("w", rank), BACK, (Shard(0),))
    for collective in (y.full_tensor, lambda: y.redistribute(placements=[Replicate()]), y.device_mesh.get_group):
        if rank in BACK.ranks:
            with pytest.raises(RuntimeError, match=r"xm.Mesh, which has no process groups.*Pass a DeviceMesh"):
                collective()
    ranks_only = xm.device_mesh(xm.Mesh([[0, 1], [2, 3]]))
    assert pickle.loads(pickle.dumps(ranks_only)) == ranks_only
    assert xm.Mesh(ranks_only) == xm.Mesh([[0, 1], [2, 3]])
    world = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    parts = xm.Mesh(world)
    assert parts["tp"].ranks == parts[rank // 2].ranks == tuple(world["tp"].mesh.tolist())
    whole_mesh = xm.reshard(tensor("w", rank), world, (Replicate(), Shard(0)))
    assert torch.equal(whole_mesh.full_tensor(), whole("w"))


def hosts_as_told(rank: int, world_size: int) -> None:
    options = xm.Options()
    options.host_id = f"host {rank % 2}"
    group = dist.new_group(backend="xmesh", pg_options=options)
    topology = group_of(group).topology([0, 1, 2, 3], xm.Topology().links)
    assert topology.host_of == {0: 0, 1: 1, 2: 0, 3: 1}
    assert xm.testing.spawn is spawn


def everything(rank: int, world_size: int) -> None:
    order_of_a_dict_does_not_matter(rank, world_size)
    ranks_that_name_other_things(rank, world_size)
    nested_with_other_entries(rank, world_size)
    gradients_by_name(rank, world_size)
    collectives_on_a_mesh_without_groups(rank, world_size)
    hosts_as_told(rank, world_size)


def test_containers() -> None:
    spawn(everything, 4)
