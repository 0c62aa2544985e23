"""Views as boxes, from strides alone, against the addresses of every byte."""

from __future__ import annotations

import collections
import itertools
import math
import random
import re

import pytest
import torch

from torch_xmesh.weight_sync.boxes import intersection, volume, whole_box, without
from torch_xmesh.weight_sync.coverage import Claim, check_coverage
from torch_xmesh.weight_sync.memory import box_of_view, share_memory, shares_with_itself
from torch_xmesh.weight_sync.mistakes import Mistakes


def random_view(chooser: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """By a few operations, most of which keep a box."""
    for _ in range(chooser.randint(0, 4)):
        dim = chooser.randrange(tensor.dim()) if tensor.dim() else 0
        operation = chooser.choice(["narrow", "transpose", "flatten", "unflatten", "step", "bytes", "select", "expand"])
        if operation == "narrow" and tensor.dim():
            begin = chooser.randint(0, tensor.shape[dim] - 1)
            tensor = tensor.narrow(dim, begin, chooser.randint(1, tensor.shape[dim] - begin))
        elif operation == "transpose" and tensor.dim():
            tensor = tensor.transpose(dim, -1)
        elif operation == "flatten" and tensor.is_contiguous():
            tensor = tensor.view(-1)
        elif operation == "unflatten" and tensor.dim() and tensor.shape[dim] % 2 == 0:
            tensor = torch.unflatten(tensor, dim, (2, -1))
        elif operation == "step" and tensor.dim() and chooser.random() < 0.3:
            tensor = tensor[::2]
        elif operation == "bytes" and tensor.dim() and tensor.stride(-1) == 1 and chooser.random() < 0.5:
            tensor = tensor.view(torch.uint8)
        elif operation == "select" and tensor.dim() > 1:
            tensor = tensor.select(dim, chooser.randrange(tensor.shape[dim]))
        elif operation == "expand" and chooser.random() < 0.1:
            tensor = tensor.expand(2, *tensor.shape)
    return tensor


def random_base(chooser: random.Random) -> torch.Tensor:
    shape = [chooser.randint(1, 4) for _ in range(chooser.randint(0, 3))]
    room = torch.zeros([size + chooser.randint(0, 1) for size in shape], dtype=torch.int16)
    base = room[tuple(slice(0, size) for size in shape)]
    return base.permute(chooser.sample(range(len(shape)), len(shape)))


def addresses(tensor: torch.Tensor) -> list[int]:
    """Of all bytes."""
    out = [tensor.data_ptr()]
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        out = [begin + index * stride * tensor.itemsize for begin in out for index in range(size)]
    return [begin + byte for begin in out for byte in range(tensor.itemsize)]


@pytest.mark.parametrize("batch", range(4))
def test_a_view_is_the_box_whose_bytes_it_has(batch: int) -> None:
    num_found = 0
    for seed in range(batch * 500, batch * 500 + 500):
        chooser = random.Random(seed)
        base = random_base(chooser)
        view = random_view(chooser, base)
        box = box_of_view(view, base)
        if box is not None:
            num_found += 1
            of_box = base[tuple(slice(*of_dim) for of_dim in box)] if base.dim() else base
            assert sorted(addresses(view)) == sorted(addresses(of_box)), seed
        elif len(set(addresses(view))) == view.numel() * view.itemsize:
            ranges = [list(itertools.combinations(range(size + 1), 2)) for size in base.shape]
            assert not any(
                set(addresses(base[tuple(slice(*of_dim) for of_dim in each)])) == set(addresses(view))
                for each in itertools.product(*ranges)
            ), f"seed {seed}: a box was not found"
    assert num_found > 300


def test_what_is_beside_a_tensor_or_overlaps_itself_is_no_box_of_it() -> None:
    whole = torch.zeros(4, 6)
    assert box_of_view(whole[:, 2:4], whole[:, 0:3]) is None
    assert box_of_view(whole, whole[1:]) is None
    assert box_of_view(torch.zeros(2), whole) is None
    assert box_of_view(whole[0].expand(2, 6), whole) is None
    assert box_of_view(whole[0], whole[0].expand(4, 6)) is None
    assert box_of_view(whole[1:3, 2:5].t(), whole) == ((1, 3), (2, 5))
    assert box_of_view(whole.view(torch.uint8)[1, 4:12], whole) == ((1, 2), (1, 3))
    assert box_of_view(whole.view(torch.uint8)[1, 4:11], whole) is None


@pytest.mark.parametrize("batch", range(2))
def test_tensors_share_memory_where_they_have_an_address_in_common(batch: int) -> None:
    for seed in range(batch * 500, batch * 500 + 500):
        chooser = random.Random(seed)
        base = random_base(chooser)
        a, b = random_view(chooser, base), random_view(chooser, base)
        assert share_memory(a, b) == bool(set(addresses(a)) & set(addresses(b))), seed
        assert shares_with_itself(a) == (len(set(addresses(a))) < len(addresses(a))), seed


@pytest.mark.parametrize("batch", range(4))
def test_what_is_not_covered_once_is_found(batch: int) -> None:
    """Claims of random views: boxes, what is none, and what lies elsewhere."""
    outcomes = set()
    for seed in range(batch * 500, batch * 500 + 500):
        chooser = random.Random(seed)
        base = random_base(chooser)
        target = base if chooser.random() < 0.9 else random_view(chooser, base)
        views = [random_view(chooser, base) for _ in range(chooser.randint(1, 3))]
        if chooser.random() < 0.5:  # what covers it once
            views = [part for half in target.chunk(2) for part in half.chunk(2, -1)] if target.dim() else [target]
        mistakes = Mistakes()
        check_coverage("x", target, [Claim(str(index), view) for index, view in enumerate(views)], mistakes)
        times = collections.Counter(address for view in views for address in addresses(view))
        is_right = collections.Counter(addresses(target)) == times and set(times.values()) == {1}
        outcomes.add(is_right)
        if is_right:
            mistakes.raise_if_any()
            continue
        with pytest.raises(ValueError) as caught:
            mistakes.raise_if_any()
        boxes = re.findall(r"x \[(.*)\] is covered by nothing", str(caught.value))
        missing = [math.prod(int(end) - int(begin) for begin, end in re.findall(r"(\d+):(\d+)", box)) for box in boxes]
        counted = re.findall(r"covered by nothing in (\d+)", str(caught.value))
        if not re.search("share memory|not the target's", str(caught.value)):  # then views are left out
            bytes_missing = set(addresses(target)) - set(times)
            elements = {address // target.itemsize for address in bytes_missing}
            assert sum(missing) + sum(map(int, counted)) == len(elements), seed
            assert ("twice" in str(caught.value)) == any(times[address] > 1 for address in addresses(target)), seed
    assert outcomes == {True, False}


def test_boxes_without_a_hole_are_the_other_elements() -> None:
    chooser = random.Random(0)
    for _ in range(200):
        shape = [chooser.randint(1, 4) for _ in range(chooser.randint(0, 3))]
        hole = tuple(sorted((chooser.randint(0, size), chooser.randint(0, size))) for size in shape)
        hole_box = tuple((begin, end) for begin, end in hole)
        count = torch.zeros(shape, dtype=torch.int32)
        rest = without([whole_box(shape)], hole_box)
        for box in [*rest, hole_box]:
            count[tuple(slice(*of_dim) for of_dim in box)] += 1
        assert bool((count == 1).all())
        assert sum(map(volume, rest)) + volume(hole_box) == count.numel()
        assert all(intersection(a, b) is None for a, b in itertools.combinations(rest, 2))
