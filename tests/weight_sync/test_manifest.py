"""Manifests and catalogs: what processes have, as text and back, and what cannot be said of them."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from torch_xmesh.weight_sync import Catalog, Manifest, OwnedBox
from torch_xmesh.weight_sync.manifest import HeldTensor


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of two ranks, seen by the second one."""
    dist.init_process_group("fake", rank=1, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(4, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.head = torch.nn.Linear(2, 4, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("mask", torch.zeros(3), persistent=False)


def test_a_module_has_its_state_dict_and_ties() -> None:
    model = Model()
    manifest = Manifest.of({"model": [model], "step": 3, "extra": None})
    assert sorted(manifest.tensors) == [f"model.0.{name}" for name in sorted(model.state_dict())]
    head = manifest.tensors["model.0.head.weight"]
    assert head.boxes == (((0, 4), (0, 2)),)
    assert head.same_as == "model.0.embedding.weight"
    assert manifest.tensors["model.0.embedding.weight"].same_as is None
    assert head.views[0].data_ptr() == model.head.weight.data_ptr()
    assert manifest.tensors["model.0.norm.num_batches_tracked"].boxes == ((),)
    assert not any(view.requires_grad for held in manifest.tensors.values() for view in held.views)


def test_a_manifest_is_what_its_text_says(mesh: DeviceMesh) -> None:
    tensors = {
        "shard": distribute_tensor(torch.arange(10).view(5, 2), mesh, [Shard(0)], src_data_rank=None),
        "none": distribute_tensor(torch.zeros(1, 2), mesh, [Shard(0)], src_data_rank=None),
        "plain": torch.zeros(3, dtype=torch.float8_e4m3fn),
        "empty": torch.zeros(0, 4),
    }
    manifest = Manifest.of(tensors)
    assert manifest.tensors["shard"].boxes == (((3, 5), (0, 2)),)
    assert manifest.tensors["none"].boxes == manifest.tensors["empty"].boxes == ()
    text = manifest.to_json()
    read = Manifest.from_json(text)
    assert read == manifest
    assert read.to_json() == text
    assert all(held.views == () for held in read.tensors.values())


def test_a_catalog_says_who_has_which_boxes() -> None:
    upper, lower, whole = ((0, 2),), ((2, 4),), ((0, 4),)
    manifests = {
        9: Manifest({"w": HeldTensor((4,), torch.float32, (lower,))}),
        2: Manifest({"w": HeldTensor((4,), torch.float32, (upper,)), "b": HeldTensor((), torch.bool, ((),))}),
        4: Manifest({"w": HeldTensor((4,), torch.float32, (whole,))}),
        3: Manifest({"w": HeldTensor((4,), torch.float32, (upper,))}),
    }
    catalog = Catalog.merge(manifests)
    assert list(catalog.tensors) == ["b", "w"]
    assert catalog.tensors["w"].owned == (OwnedBox(upper, (2, 3)), OwnedBox(whole, (4,)), OwnedBox(lower, (9,)))
    assert catalog.tensors["b"].owned == (OwnedBox((), (2,)),)
    assert catalog == Catalog.merge(dict(reversed(manifests.items())))


def test_what_nobody_holds() -> None:
    chooser = random.Random(0)
    for _ in range(500):
        shape = tuple(chooser.randint(1, 4) for _ in range(chooser.randint(0, 3)))
        cuts = [sorted({0, size, *chooser.choices(range(size + 1), k=2)}) for size in shape]
        tiles = list(itertools.product(*(itertools.pairwise(of_dim) for of_dim in cuts)))
        boxes = set(chooser.sample(tiles, len(tiles) - chooser.choice([0, 0, min(1, len(tiles))])))
        if chooser.random() < 0.5:
            boxes.add(tuple((begin, begin + 1) for begin in (chooser.randrange(size) for size in shape)))
        held = HeldTensor(shape, torch.float32, tuple(boxes))
        count = torch.zeros(shape, dtype=torch.int32)
        for box in boxes:
            count[tuple(slice(*of_dim) for of_dim in box)] = 1
        for box in Catalog.merge({0: Manifest({"w": held})}).tensors["w"].unheld:
            count[tuple(slice(*of_dim) for of_dim in box)] += 1
        assert bool((count == 1).all())


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (torch.zeros(4, 3), "tensor 'w' has shape (4, 2) at member 1, but (4, 3) at member 7"),
        (
            torch.zeros(4, 2, dtype=torch.bfloat16),
            "tensor 'w' has dtype torch.float32 at member 1, but torch.bfloat16 at member 7",
        ),
    ],
)
def test_members_that_disagree(other: torch.Tensor, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        Catalog.merge({7: Manifest.of({"w": other}), 1: Manifest.of({"w": torch.zeros(4, 2)})})
    assert str(caught.value) == text


def test_sources_tied_on_one_member_only_are_not_tied() -> None:
    weight = torch.zeros(2)
    tied, apart = Manifest.of({"a": weight, "b": weight}), Manifest.of({"a": weight, "b": weight.clone()})
    assert Catalog.merge({0: tied, 1: tied}).memory_of("b") == "a"
    assert Catalog.merge({0: tied, 1: apart}).memory_of("b") == "b"


def test_tensors_that_no_manifest_can_have(mesh: DeviceMesh) -> None:
    partial = DTensor.from_local(torch.zeros(2), mesh, [Partial()])
    uneven = DTensor.from_local(torch.zeros(3), mesh, [Shard(0)], shape=torch.Size((4,)), stride=(1,))
    for wrong, text in (
        ({"w": partial}, "tensor 'w' is a DTensor of placements (Partial(sum),): its values are still to be added up"),
        ({"w": uneven}, "has a local tensor of shape (3,) at mesh coordinate (1,), expected (2,)"),
        ({"w": torch.zeros(2, device="meta")}, "tensor 'w' is on meta: it has no memory"),
        ({"w": torch.zeros(2).to_sparse()}, "tensor 'w' is of layout torch.sparse_coo, expected a dense one"),
        ({"w": {1, 2}}, "w: expected a tensor, a module, a dict or a list, got set"),
        (torch.zeros(2), "weights are a module, a dict or a list of tensors, got Tensor"),
        (None, "weights are a module, a dict or a list of tensors, got NoneType"),
        ({1.5: torch.zeros(2)}, "the key 1.5 in the dict: expected a string or an integer"),
        ({"a.b": torch.zeros(2), "a": {"b": torch.zeros(2)}}, "two tensors have the name 'a.b'"),
    ):
        with pytest.raises(ValueError) as caught:
            Manifest.of(wrong)
        assert text in str(caught.value)


GOOD = {"shape": [4, 2], "dtype": "float32", "boxes": [[[0, 4], [0, 2]]], "same_as": None}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "a manifest is JSON, but: "),
        ("[" * 100_000, "a manifest is JSON, but: "),
        ("[]", "a manifest has version 1, got []"),
        ('{"version": 2}', "a manifest has version 1, got 2"),
        ('{"version": 1, "tensors": []}', "a manifest has a dict of tensors, got []"),
        ({"shape": [4]}, "expected shape, dtype, boxes and same_as, got {'shape': [4]}"),
        ({**GOOD, "shape": [4, -2]}, "expected a shape of integers that are not negative, got [4, -2]"),
        ({**GOOD, "shape": [4, True]}, "expected a shape of integers that are not negative, got [4, True]"),
        ({**GOOD, "dtype": "nn"}, "expected a dtype of torch, got 'nn'"),
        ({**GOOD, "boxes": 3}, "expected a list of boxes, got 3"),
        ({**GOOD, "boxes": [[[0, 4], [0, 2.5]]]}, "expected a box of one [begin, end] per dim, got [[0, 4], [0, 2.5]]"),
        ({**GOOD, "boxes": [[[0, 4]]]}, "expected a box with elements, inside the shape (4, 2), got [[0, 4]]"),
        (
            {**GOOD, "boxes": [[[0, 4], [1, 3]]]},
            "expected a box with elements, inside the shape (4, 2), got [[0, 4], [1, 3]]",
        ),
        (
            {**GOOD, "boxes": [[[0, 4], [1, 1]]]},
            "expected a box with elements, inside the shape (4, 2), got [[0, 4], [1, 1]]",
        ),
        ({**GOOD, "same_as": 3}, "expected the name of a tied tensor or null, got 3"),
    ],
)
def test_texts_that_are_no_manifest(text: object, said: str) -> None:
    whole = text if isinstance(text, str) else json.dumps({"version": 1, "tensors": {"w": text}})
    with pytest.raises(ValueError) as caught:
        Manifest.from_json(whole)
    assert said in str(caught.value)
    assert isinstance(text, str) or str(caught.value).startswith("tensor 'w' of a manifest: ")
