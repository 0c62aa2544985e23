"""What a person writes, and the regions that become of it."""

from __future__ import annotations

import doctest

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import torch_xmesh.weight_sync
from torch_xmesh.weight_sync import Catalog, Region, apply_map, concat, rename, resolve, take
from torch_xmesh.weight_sync.boxes import GivenBox
from torch_xmesh.weight_sync.resolving import Entry

SOURCES = {
    "q": torch.randn(4, 6),
    "k": torch.randn(2, 6),
    "v": torch.randn(2, 6),
    "half": torch.randn(4, 6).bfloat16(),
}
CATALOG = Catalog.of(SOURCES)


def test_the_example_is_as_it_is_shown() -> None:
    tried = doctest.testmod(torch_xmesh.weight_sync, extraglobs={"torch": torch})
    assert tried.attempted > 5
    assert tried.failed == 0


def test_regions_by_hand_fill_views_of_a_fused_target() -> None:
    fused = torch.zeros(6, 8, dtype=torch.bfloat16)
    rows = fused.t()
    regions = [
        Region("q", None, rows[:4]),
        Region("v", ..., rows[6:]),
        Region("k", [slice(None), (0, 6)], rows[4:6]),
    ]
    apply_map(SOURCES, resolve({"qkv": fused}, {"qkv": regions}, CATALOG))
    assert torch.equal(rows, torch.cat([SOURCES["q"], SOURCES["k"], SOURCES["v"]]).bfloat16())


def test_what_resolve_returns() -> None:
    target = torch.zeros(10, 6, dtype=torch.bfloat16)
    (entry,) = resolve([target], {"0": concat(["q", take("k").rows(1, 2), "q"]).pad(0, 10, 1)}, CATALOG)
    assert [(region.source, region.ranges, region.dtype) for region in entry.regions] == [
        ("q", ((0, 4), (0, 6)), torch.bfloat16),
        ("k", ((1, 2), (0, 6)), torch.bfloat16),
        ("q", ((0, 4), (0, 6)), torch.bfloat16),
    ]
    (fill,) = entry.fills
    assert (fill.into.data_ptr(), fill.into.shape, fill.value) == (target[9:].data_ptr(), (1, 6), 1)


@pytest.mark.parametrize(
    ("source", "into", "under_way"),
    [
        ("half", torch.float32, torch.bfloat16),
        ("half", torch.bfloat16, torch.bfloat16),
        ("half", torch.float16, torch.float16),
        ("q", torch.bfloat16, torch.bfloat16),
        ("q", torch.float64, torch.float32),
    ],
)
def test_elements_are_cast_at_the_narrower_end(source: str, into: torch.dtype, under_way: torch.dtype) -> None:
    (entry,) = resolve({source: torch.zeros(4, 6, dtype=into)}, {}, CATALOG)
    assert entry.regions[0].dtype == under_way


def test_a_modules_parameters_and_buffers_take_the_sources_of_their_names() -> None:
    trained, served = (torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)) for _ in range(2))
    trained.state_dict()["1.running_mean"].add_(3.5)
    sources = {f"model.{name}": tensor for name, tensor in trained.state_dict().items()}
    rules = {r"^(\d)": r"layers.\1", "^layers": "model"}  # the second one sees what the first one made
    resolved = resolve(served, {}, Catalog.of(sources), renaming=rules)
    assert resolve(served, {}, Catalog.of(sources), renaming=rename(rules))
    apply_map(sources, resolved)
    for name, tensor in served.state_dict().items():
        assert torch.equal(tensor, trained.state_dict()[name])
    assert [entry.name for entry in resolved] == sorted(served.state_dict())


def test_the_order_of_names_does_not_matter() -> None:
    targets = {name: torch.zeros(tensor.shape) for name, tensor in SOURCES.items()}
    backwards = dict(reversed(targets.items()))
    apply_map(SOURCES, resolve(backwards, {}, Catalog.of(dict(reversed(SOURCES.items())))))
    assert all(torch.equal(targets[name], tensor) for name, tensor in SOURCES.items())


def test_two_targets_take_one_source() -> None:
    targets = {"embedding": torch.zeros(4, 6), "head": torch.zeros(6, 4)}
    apply_map(SOURCES, resolve(targets, {"embedding": take("q"), "head": take("q").t()}, CATALOG))
    assert torch.equal(targets["embedding"], targets["head"].t())


def test_a_hook_does_what_casts_do_not_know() -> None:
    scales = torch.zeros(2, 2)
    weight = torch.zeros(4, 6, dtype=torch.int8)

    def quantize(received: torch.Tensor, into: torch.Tensor, box: tuple[tuple[int, int], ...]) -> None:
        blocks = received.view(received.shape[0] // 2, 2, received.shape[1] // 3, 3)
        found = blocks.abs().amax((1, 3)) / 127
        scales[box[0][0] // 2 : box[0][1] // 2, box[1][0] // 3 : box[1][1] // 3] = found
        into.copy_((received / found.repeat_interleave(2, 0).repeat_interleave(3, 1)).round())

    (entry,) = resolve({"w": weight}, {"w": take("q").through(quantize, (2, 3))}, CATALOG)
    (region,) = entry.regions
    assert (region.dtype, region.block, region.hook) == (torch.float32, (2, 3), quantize)
    apply_map(SOURCES, [entry])
    again = weight * scales.repeat_interleave(2, 0).repeat_interleave(3, 1)
    assert float((again - SOURCES["q"]).abs().max()) <= float(scales.max()) / 2 + 1e-6


def test_staged_regions_go_to_a_loader() -> None:
    mapping: dict[str, Entry] = {"k": Region("k", [(1, 2), (0, 6)], dtype=torch.float16, staged=True), "q": take("q")}
    target = torch.zeros(4, 6)
    resolved = resolve({"q": target}, mapping, CATALOG)
    loaded: dict[str, torch.Tensor] = {}
    apply_map(SOURCES, resolved, lambda region, tensor: loaded.update({region.source: tensor}))
    assert torch.equal(target, SOURCES["q"])
    assert torch.equal(loaded["k"], SOURCES["k"][1:].half())
    with pytest.raises(ValueError, match="'k' is staged: expected a loader for it"):
        apply_map(SOURCES, resolved)


def test_a_target_whose_regions_are_staged_is_its_loaders_to_fill() -> None:
    target = torch.zeros(4, 6)
    staged = Region("q", staged=True)

    def loader(region: Region, tensor: torch.Tensor) -> None:
        assert region.source == "q"
        target.copy_(tensor.flip(0))

    apply_map(SOURCES, resolve({"q": target}, {"q": staged}, CATALOG), loader)
    assert torch.equal(target, SOURCES["q"].flip(0))
    with pytest.raises(ValueError, match=r"target 'q' \[2:4, 0:6\] is covered by nothing"):
        resolve({"q": target}, {"q": [staged, Region("k", None, target[:2])]}, CATALOG)


def test_a_box_has_ranges_once_it_is_resolved() -> None:
    view = torch.zeros(4, 6)
    boxes: list[GivenBox] = [None, ..., [slice(None), (0, 6)]]
    for box in boxes:
        with pytest.raises(ValueError, match="has no ranges before it is resolved"):
            _ = Region("q", box, view).ranges
    (entry,) = resolve({"q": view}, {"q": Region("q", [slice(None), slice(-6, None)], view)}, CATALOG)
    assert entry.regions[0].ranges == ((0, 4), (0, 6))
    with pytest.raises(ValueError, match="a box has no steps"):
        resolve({"q": view}, {"q": Region("q", [slice(None, None, 2), (0, 6)], view)}, CATALOG)


def test_a_process_outside_a_targets_mesh_has_nothing_to_fill() -> None:
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (4,))
        inside = distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0)], src_data_rank=None)
        elsewhere = DeviceMesh("cpu", [0, 1])
        outside = DTensor.from_local(torch.zeros(0, 6), elsewhere, [Shard(0)], shape=torch.Size((2, 6)), stride=(6, 1))
        entries = resolve({"q": inside, "k": outside}, {}, CATALOG)
        assert [(entry.name, [region.ranges for region in entry.regions]) for entry in entries] == [
            ("k", []),
            ("q", [((3, 4), (0, 6))]),
        ]
    finally:
        dist.destroy_process_group()
