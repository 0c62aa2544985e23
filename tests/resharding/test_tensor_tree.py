"""Containers of tensors on one rank: their order, their names, and what fits them."""

from __future__ import annotations

import random
from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

import torch_xmesh as xm
from torch_xmesh.tensor_tree import TensorTree, is_placements


def spec(extent: int = 4) -> xm.Spec:
    return xm.Spec((extent,), torch.float32, xm.Mesh([0]), (Replicate(),))


def shuffled(value: Any, rng: random.Random) -> Any:
    if isinstance(value, dict):
        keys = list(value)
        rng.shuffle(keys)
        return {key: shuffled(value[key], rng) for key in keys}
    return [shuffled(held, rng) for held in value] if isinstance(value, list) else value


def test_any_order_of_dicts_gives_the_same_tensors() -> None:
    state = {
        "b": [spec(i) for i in range(12)],
        "a": {2: spec(20), 10: spec(21), "2": spec(22), (1, "x"): spec(23)},
        "n": 3,
    }
    first = TensorTree(state)
    assert [s.shape[0] for s in first.tensors][-12:] == list(range(12))
    for seed in range(20):
        other = TensorTree(shuffled(state, random.Random(seed)))
        assert (other.tensors, other.labels, other.entries) == (first.tensors, first.labels, first.entries)
        assert other.rebuild([s.shape[0] for s in other.tensors]) == {
            "b": list(range(12)),
            "a": {2: 20, 10: 21, "2": 22, (1, "x"): 23},
            "n": 3,
        }


class Pair(NamedTuple):
    left: Any
    right: Any


def test_containers_keep_their_kind() -> None:
    tree = TensorTree(Pair(spec(), [spec(), "text"]))
    assert tree.labels == (".left", ".right[0]")
    assert tree.rebuild([1, 2]) == Pair(1, [2, "text"])
    assert TensorTree(UserDict(b=spec())).rebuild([5]) == {"b": 5}
    assert TensorTree([spec(), spec()]).labels == ()
    assert TensorTree((spec(),)).entries == TensorTree([spec()]).entries


@pytest.mark.parametrize(
    ("xs", "pattern"),
    [
        ({"a": torch.ones(2)}, r"\['a'\]: expected a DTensor or an xm.Spec, got Tensor"),
        ({"a": UserDict(b=spec())}, r"\['a'\] is a UserDict with tensors"),
        ({"a": {spec()}}, r"\['a'\] is a set with tensors"),
        ({1.5: spec()}, r"the key 1.5: expected strings, integers"),
        (spec(), "expected a list or a dict of tensors, got Spec"),
        (None, "expected a list or a dict of tensors, got NoneType"),
    ],
)
def test_refuses(xs: Any, pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        TensorTree(xs)


def test_values_for_all_for_branches_and_for_each() -> None:
    tree = TensorTree({"m": {"a": spec(), "b": [spec(), spec()]}, "n": 1})
    row, column, both = [Shard(0)], (Shard(1),), [Replicate(), Replicate()]

    def spread(values: Any) -> list[Any]:
        return tree.spread(values, is_placements, "dst_placements", "one placement per mesh axis")

    assert spread(row) == [row] * 3
    assert spread({"m": row}) == [row] * 3
    assert spread({"m": {"b": [row, both], "a": column}, "n": None}) == [column, row, both]
    for values, pattern in [
        ({"m": {"b": row}}, r"different keys: \['m'\]\['a'\] is in one of them only"),
        ({"m": row, "c": row}, r"different keys: \['c'\] is in one of them only"),
        ({"m": {"a": row, "b": [row, row, row]}}, r"different keys: \['m'\]\['b'\]\[2\] is in one"),
        ({"m": 3}, r"dst_placements of tensor|different keys|expected one placement"),
    ]:
        with pytest.raises(ValueError, match=pattern):
            spread(values)
