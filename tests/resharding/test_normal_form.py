"""Keys of a reshard's arguments: equal where the same is moved, different where anything else is."""

from __future__ import annotations

import copy
import itertools
import random
from collections import OrderedDict, UserDict
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import torch_xmesh as xm
from torch_xmesh import _C

A, B = xm.Mesh([0, 1]), xm.Mesh([2, 3])


def spec(shape: tuple[int, ...] = (4, 6), **other: Any) -> xm.Spec:
    given = {"dtype": torch.float32, "mesh": A, "placements": (Shard(0),), **other}
    return xm.Spec(shape, **given)


def key(forms: _C.NormalForms, arguments: tuple[Any, ...], with_grad: bool = True) -> bytes | None:
    xs, dst_mesh, dst_placements, out, options = arguments
    form = forms.of(xs, dst_mesh, dst_placements, out, options, with_grad)
    return None if form is None else form.key


USUAL: tuple[Any, ...] = ({"a": spec(), "b": spec()}, B, [Shard(0)], None, ("auto", None))


def changed(position: int, *values: Any) -> list[tuple[Any, ...]]:
    return [(*USUAL[:position], value, *USUAL[position + 1 :]) for value in values]


DIFFERENT: list[tuple[Any, ...]] = [
    USUAL,
    *changed(
        0,
        {"b": spec(), "a": spec()},
        {"a": spec(), 2: spec()},
        {"a": spec(), "2": spec()},
        OrderedDict(a=spec(), b=spec()),
        [spec(), spec()],
        (spec(), spec()),
        [[spec()], spec()],
        [[spec(), spec()]],
        {"a": spec(), "b": spec(), "c": 1},
        {"a": spec(), "b": spec(), "c": 1.0},
        {"a": spec(), "b": spec(), "c": True},
        {"a": spec(), "b": spec(), "c": None},
        {"a": spec(), "b": spec(), "c": "1"},
        {"a": spec(), "b": spec(), "c": []},
        *(
            {"a": spec(), "b": other}
            for other in (
                spec((6, 4)),
                spec((24,)),
                spec((128, 1)),
                spec((1, 128)),
                spec(dtype=torch.float16),
                spec(requires_grad=True),
                spec(mesh=B),
                spec(mesh=xm.Mesh([1, 0])),
                spec(mesh=xm.Mesh([[0, 1]]), placements=(Replicate(), Shard(0))),
                spec(mesh=xm.Mesh([0, 1], device_type="meta")),
                spec(placements=(Shard(1),)),
                spec(placements=(Replicate(),)),
                spec(placements=(Partial("sum"),)),
                spec(placements=(Partial("avg"),)),
                spec(placements=(_StridedShard(0, split_factor=1),)),
                spec(placements=(_StridedShard(0, split_factor=2),)),
            )
        ),
    ),
    *changed(1, A, {"a": B, "b": A}, [B]),
    *changed(2, [Shard(1)], (Shard(0),), [Replicate()], [Shard(0), Shard(0)], {"a": [Shard(0)], "b": [Shard(0)]}),
    *changed(3, {"a": spec(), "b": spec()}),
    *changed(4, ("broadcast", None), ("auto", xm.Topology({0: 0, 1: 0, 2: 1, 3: 1}))),
]


def test_whatever_differs_has_a_key_of_its_own() -> None:
    forms = _C.NormalForms()
    keys = [key(forms, arguments) for arguments in DIFFERENT]
    assert None not in keys
    for (i, one), (k, other) in itertools.combinations(enumerate(keys), 2):
        assert one != other, (DIFFERENT[i], DIFFERENT[k])


def test_equal_arguments_have_equal_keys() -> None:
    forms = _C.NormalForms()
    keys = [key(forms, arguments) for arguments in DIFFERENT]
    order = list(range(len(DIFFERENT)))
    random.Random(0).shuffle(order)
    for i in order:  # other objects, in another order
        xs, mesh, placements, out, options = DIFFERENT[i]
        again = (copy.deepcopy(xs), copy.copy(mesh), copy.deepcopy(placements), copy.deepcopy(out), copy.copy(options))
        assert key(forms, again) == keys[i], DIFFERENT[i]


def test_gradients_count_where_they_are_recorded() -> None:
    forms = _C.NormalForms()
    (with_grad,) = changed(0, [spec(requires_grad=True)])
    (without,) = changed(0, [spec()])
    assert key(forms, with_grad) != key(forms, without)
    assert key(forms, with_grad, with_grad=False) == key(forms, without, with_grad=False) == key(forms, without)


class Sub(list[Any]):
    pass


class MyShard(Shard):
    pass


def nested(depth: int) -> Any:
    return spec() if depth == 0 else [nested(depth - 1)]


@pytest.mark.parametrize(
    "xs",
    [
        [torch.ones(2)],
        Sub([spec()]),
        UserDict(a=spec()),
        {(1, 2): spec()},
        {True: spec()},
        {1.0: spec()},
        [spec(), object()],
        [spec(), torch.Size([2])],
        [spec(), b"bytes"],
        nested(100),
    ],
    ids=lambda xs: f"{type(xs).__name__} of {', '.join(type(x).__name__ for x in xs)}",
)
def test_what_is_not_known_has_no_key(xs: Any) -> None:
    assert key(_C.NormalForms(), (xs, *USUAL[1:])) is None


def test_options_without_a_hash_have_no_key() -> None:
    forms = _C.NormalForms()
    assert key(forms, (*USUAL[:4], ("auto", {}))) is None
    assert key(forms, USUAL) is not None


def test_a_kind_of_placement_is_part_of_it() -> None:
    forms = _C.NormalForms()
    (plain,), (other,) = changed(2, [Shard(0)]), changed(2, [MyShard(0)])
    assert key(forms, plain) != key(forms, other)


def test_more_names_than_are_kept_give_no_equal_keys() -> None:
    forms = _C.NormalForms()
    x = spec()
    first = [key(forms, ({f"name {i}": x}, *USUAL[1:])) for i in range(10)]
    seen = set(first)
    for i in range(10, 70_000):
        found = key(forms, ({f"name {i}": x}, *USUAL[1:]))
        assert found not in seen
        seen.add(found)
    assert key(forms, ({"name 3": x}, *USUAL[1:])) not in seen  # it was forgotten, and is not taken for another one


def test_leaves_and_what_is_built_around_others() -> None:
    xs = OrderedDict(w=[spec(), (spec((3,)), 7)], b={}, c={"n": None})
    form = _C.NormalForms().of(xs, B, [Shard(0)], None, ("auto", None), True)
    assert form is not None
    placements: tuple[Placement, ...] = (Shard(0),)
    assert [leaf.placements if isinstance(leaf, xm.Spec) else leaf for leaf in form.leaves] == [
        placements,
        placements,
        7,
        None,
    ]
    built = _C.rebuilt(xs, ["x", "y", "z", "none"])
    assert built == OrderedDict(w=["x", ("y", "z")], b={}, c={"n": "none"})
    assert type(built) is OrderedDict
