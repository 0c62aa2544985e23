"""What is wrong with a map is said in one error, by names and boxes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from torch_xmesh.weight_sync import Catalog, Manifest, Region, concat, rename, resolve, stack, take
from torch_xmesh.weight_sync.manifest import HeldTensor
from torch_xmesh.weight_sync.resolving import Entry

SOURCES = {
    "q.weight": torch.arange(24.0).view(4, 6),
    "k.weight": torch.zeros(2, 6),
    "spectrum": torch.zeros(3, dtype=torch.complex64),
    "scale": torch.ones(()),
}


def said(targets: Any, mapping: Mapping[str, Entry], catalog: Catalog | None = None) -> list[str]:
    """The lines of the error below its first one."""
    with pytest.raises(ValueError) as caught:
        resolve(targets, mapping, catalog or Catalog.of(SOURCES))
    first, *lines = str(caught.value).splitlines()
    number = len(lines) - 1 + int(lines[-1].split()[2]) if lines and lines[-1].startswith("  ... and") else len(lines)
    assert first == f"the map of weights has {number} mistake{'s' * (number > 1)}:"
    return [line.strip() for line in lines]


def test_what_nothing_covers() -> None:
    target = torch.empty(6, 6)
    assert said({"qk": target}, {"qk": Region("q.weight", None, target[:4])}) == [
        "target 'qk' [4:6, 0:6] is covered by nothing"
    ]
    assert said({"qk": target}, {"qk": [Region("k.weight", [(0, 2), slice(0, 3)], target[2:4, 1:4])]}) == [
        "target 'qk' [0:2, 0:6] is covered by nothing",
        "target 'qk' [4:6, 0:6] is covered by nothing",
        "target 'qk' [2:4, 0:1] is covered by nothing",
        "target 'qk' [2:4, 4:6] is covered by nothing",
    ]


def test_what_is_covered_twice() -> None:
    target = torch.empty(4, 6)
    regions = [Region("q.weight", ..., target), Region("k.weight", [(1, 2), (0, 3)], target.t()[2:5, 3:4].t())]
    assert said({"q": target}, {"q": regions}) == [
        "target 'q' [3:4, 2:5] is covered twice: by 'q.weight' [0:4, 0:6] and by 'k.weight' [1:2, 0:3]"
    ]


def test_views_that_are_no_box_are_counted() -> None:
    target = torch.empty(6, 4)
    flat = target.view(-1)
    whole = [Region("q.weight", [(0, 2), (0, 5)], flat[2:12].view(2, 5)), Region("scale", None, flat[0])]
    lines = said({"x": target}, {"x": whole})
    assert lines == ["target 'x' is covered by nothing in 13 elements, from index (0, 1)"]
    odd = [Region("q.weight", [(0, 3), (0, 4)], flat.view(12, 2)[:, 1].view(3, 4))]
    even = [Region("q.weight", [(0, 3), (0, 4)], flat.view(12, 2)[:, 0].view(3, 4))]
    (entry,) = resolve({"x": target}, {"x": odd + even}, Catalog.of(SOURCES))
    assert len(entry.regions) == 2
    assert said({"x": target}, {"x": odd + even + [Region("k.weight", [(0, 1), (0, 5)], flat[6:11].view(1, 5))]}) == [
        "target 'x' is covered twice, in 2 elements from index (1, 3): by 'q.weight' [0:3, 0:4] and by 'k.weight' "
        "[0:1, 0:5]",
        "target 'x' is covered twice, in 3 elements from index (1, 2): by 'q.weight' [0:3, 0:4] and by 'k.weight' "
        "[0:1, 0:5]",
    ]
    three = [Region("q.weight", [(0, 1), (0, 2)], flat[begin : begin + 8].view(4, 2)[:1]) for begin in (0, 0, 1)]
    with_hole = [*three, Region("q.weight", [(0, 3), (0, 5)], flat[3:18].view(3, 5))]
    assert [line.partition(": ")[0] for line in said({"x": target}, {"x": with_hole})] == [
        "target 'x' is covered twice, in 2 elements from index (0, 0)",
        "target 'x' is covered twice, in 1 element from index (0, 1)",
        "target 'x' is covered by nothing in 6 elements, from index (4, 2)",
    ]


def test_memory_that_is_not_the_targets_or_overlaps_itself() -> None:
    whole = torch.empty(5, 6)
    target = whole[:4]
    assert said({"q": target}, {"q": [Region("q.weight", None, whole[1:])]}) == [
        "target 'q': 'q.weight' [0:4, 0:6] goes to memory that is not the target's",
        "target 'q' is covered by nothing in 24 elements, from index (0, 0)",
    ]
    assert "'q.weight' [0:4, 0:6] goes to memory that is not the target's" in "".join(
        said({"q": target}, {"q": [Region("q.weight", None, torch.empty(4, 6))]})
    )
    assert said({"q": target}, {"q": [Region("q.weight", None, target[0].expand(4, 6))]}) == [
        "target 'q': 'q.weight' [0:4, 0:6] goes to memory whose elements share memory",
        "target 'q' is covered by nothing in 24 elements, from index (0, 0)",
    ]
    assert said({"q": torch.empty(6).expand(4, 6)}, {"q": take("q.weight")}) == [
        "target 'q' has elements that share memory (strides (0, 1)): nothing can cover it once"
    ]
    assert said({"q": torch.empty(0, 6)}, {"q": Region("q.weight", None, whole[:4])}) == [
        "target 'q' is empty, but 'q.weight' [0:4, 0:6] fills memory there"
    ]


def test_targets_that_share_memory() -> None:
    fused = torch.empty(6, 6)
    parts = {"qk": concat(["q.weight", "k.weight"]), "k.weight": take("k.weight")}
    assert said({"qk": fused, "k.weight": fused[4:]}, parts) == [
        "targets 'qk' and 'k.weight' share memory but are not the same: expected one of them, or both with one shape "
        "and strides"
    ]
    columns = torch.empty(4, 12)
    targets = {"q.weight": columns[:, :6], "other": columns[:, 6:]}
    assert len(resolve(targets, {"other": take("q.weight")}, Catalog.of(SOURCES))) == 2


def test_tied_targets_are_filled_once_and_alike() -> None:
    embedding = torch.empty(4, 6)
    targets = {"q.weight": embedding, "lm_head.weight": embedding}
    head, tied = resolve(targets, {}, Catalog.of(SOURCES))
    assert (head.name, head.same_as, head.regions) == ("lm_head.weight", "q.weight", ())
    assert (tied.name, tied.same_as, len(tied.regions)) == ("q.weight", None, 1)
    other = {**SOURCES, "lm_head.weight": torch.zeros(4, 6)}
    assert said(targets, {}, Catalog.of(other)) == [
        "targets 'lm_head.weight' and 'q.weight' are the same memory (tied), but are filled differently, by "
        "'lm_head.weight' and by 'q.weight'"
    ]
    resolve(targets, {}, Catalog.of({**SOURCES, "lm_head.weight": SOURCES["q.weight"]}))


def test_targets_without_elements_or_with_dims_of_one_are_told_apart() -> None:
    sources = {"a": torch.zeros(0, 2), "b": torch.zeros(0, 2), "c": torch.zeros(1, 6)}
    row = torch.empty(6)
    targets = {"a": torch.empty(0, 2), "b": torch.empty(0, 2), "c": row[None], "tied": row.as_strided((1, 6), (1, 1))}
    entries = resolve(targets, {}, Catalog.of(sources))
    assert [(entry.name, entry.same_as) for entry in entries] == [("a", None), ("b", None), ("c", None), ("tied", "c")]


def test_shapes_that_differ() -> None:
    assert said({"q.weight": torch.empty(4, 5), "x": torch.empty(8, 6)}, {"x": concat(["q.weight"] * 3)}) == [
        "target 'q.weight' has shape (4, 5), but what fills it ('q.weight') (4, 6)",
        "target 'x' has shape (8, 6), but what fills it ('q.weight') (12, 6)",
    ]
    target = torch.empty(6, 4)
    assert said({"x": target}, {"x": Region("q.weight", None, target)}) == [
        "target 'x': the view for 'q.weight' [0:4, 0:6] has shape (6, 4), expected (4, 6)"
    ]


def test_names_that_do_not_exist() -> None:
    assert said({"q.weights": torch.empty(4, 6), "x": torch.empty(6, 6)}, {"x": concat(["q.weight", "v"])}) == [
        "target 'q.weights': there is no source 'q.weights'; the closest are 'q.weight', 'k.weight'",
        "target 'x': there is no source 'v'",
    ]
    assert said({"q.weight": torch.empty(4, 6)}, {"qweight": take("q.weight")}) == [
        "the map has an entry 'qweight', but there is no such target; the closest is 'q.weight'"
    ]


def test_boxes_that_are_not_there_or_that_nobody_holds() -> None:
    target = torch.empty(4, 6)
    assert said({"x": target}, {"x": Region("q.weight", [(2, 6), (0, 6)], target)}) == [
        "target 'x': source 'q.weight': the box [2:6, 0:6] is not inside the tensor, whose shape is (4, 6)"
    ]
    assert (
        "expected one (begin, end) or slice per dim" in said({"x": target}, {"x": Region("scale", [(0, 1)], target)})[0]
    )
    held = HeldTensor((4, 6), torch.float32, (((0, 2), (0, 6)), ((3, 4), (0, 6))))
    catalog = Catalog.merge({3: Manifest({"q.weight": held}), 5: Manifest({"q.weight": held})})
    assert said({"q.weight": target}, {}, catalog) == [
        "target 'q.weight' needs 'q.weight' [2:3, 0:6], which nobody holds"
    ]
    resolve({"x": target[:2]}, {"x": take("q.weight").rows(0, 2)}, catalog)


def test_types_that_are_not_cast() -> None:
    targets = {
        "real": torch.empty(3),
        "whole": torch.empty(4, 6, dtype=torch.int8),
        "padded": torch.empty(4, 7, dtype=torch.bfloat16),
    }
    mapping = {
        "real": take("spectrum"),
        "whole": take("q.weight"),
        "padded": take("q.weight").pad(1, 7, 1j),
    }
    assert said(targets, mapping) == [
        "target 'padded' is of torch.bfloat16: it cannot be padded with the value 1j",
        "target 'real': source 'spectrum': torch.complex64 cannot be cast to torch.float32: its imaginary part "
        "would go",
        "target 'whole': source 'q.weight': torch.float32 is not cast to torch.int8 unless asked for: say "
        ".cast(torch.int8), or dtype=torch.int8",
    ]
    resolve({"whole": targets["whole"]}, {"whole": take("q.weight").cast(torch.int8)}, Catalog.of(SOURCES))
    assert len(said({"x": torch.empty(6)}, {"x": concat(["spectrum", "spectrum"])})) == 1  # one line of two regions
    assert "imaginary" in said({"real": targets["real"]}, {"real": take("spectrum").cast(torch.float32)})[0]


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (take("q.weight").rows(2, 5), "2:5 is not inside dim 0 of a tensor of shape (4, 6)"),
        (take("q.weight").narrow(2, 0, 1), "dim 2 is out of range for a tensor of shape (4, 6)"),
        (take("q.weight").shard(0, 2, 2), "part 2 of 2: expected an index from 0 up to the count"),
        (take("q.weight").heads(0, 0, 2, num_heads=3), "dim 0 of a tensor of shape (4, 6) has no 3 heads of one size"),
        (take("q.weight").heads(1, 0, 2, num_heads=3), "3 heads cannot be shared evenly by 2 ranks"),
        (take("q.weight").pad(0, 3), "dim 0 of a tensor of shape (4, 6) cannot be padded to 3"),
        (
            take("q.weight").cast(torch.int8).cast(torch.float16),
            "cast to torch.float16 what is cast to torch.int8 already: expected one cast",
        ),
        (stack(["q.weight"] * 2).t(), "t() of a tensor of shape (2, 4, 6): expected at most 2 dims"),
        (stack(["q.weight", "k.weight"]), "tensors of shapes (4, 6), (2, 6) cannot be stacked: expected one shape"),
        (stack(["q.weight"], 3), "dim 3 is out of range for stacked tensors of shape (4, 6)"),
        (
            concat(["q.weight", "k.weight"], 1),
            "tensors of shapes (4, 6), (2, 6) cannot be concatenated along dim 1: expected equal extents along "
            "all others",
        ),
        (take("q.weight").through(print, (1,)), "block=(1,) for 'q.weight', which has 2 dims"),
        (take("q.weight").through(print).through(print), "a hook on what has one already: expected one"),
    ],
)
def test_operations_that_do_not_fit(wrong: Entry, line: str) -> None:
    assert said({"x": torch.empty(4, 6)}, {"x": wrong}) == [f"target 'x': {line}"]


def test_many_mistakes_are_in_one_error_with_a_number_of_the_rest() -> None:
    lines = said({f"layer.{index:02}": torch.empty(2) for index in range(33)}, {})
    assert len(lines) == 21
    assert lines[19] == "target 'layer.19': there is no source 'layer.19'"
    assert lines[20] == "... and 13 more"


def test_targets_without_memory() -> None:
    assert said({"q.weight": torch.empty(4, 6, device="meta")}, {}) == [
        "target tensor 'q.weight' is on meta: it has no memory; expected weights that are there"
    ]


def test_wrong_regions_and_rules() -> None:
    view = torch.empty(2)
    for wrong, text in (
        (lambda: Region("x"), "the region of 'x' has neither of into=view and staged=True, expected one"),
        (lambda: Region("x", None, view, staged=True), "the region of 'x' has both of into=view and staged=True"),
        (lambda: Region("x", staged=True, hook=print), "the region of 'x' is staged: its loader takes the place"),
        (lambda: Region("x", None, view, block=(2,)), "has block=(2,): expected positive extents, beside a hook"),
        (lambda: concat([]), "concat of no tensors: expected at least one"),
        (lambda: rename({"(": ""}), "'(' is no regular expression"),
        (lambda: rename({"x": r"\3"})("x"), "the rule 'x' -> '\\\\3': invalid group reference"),
    ):
        with pytest.raises(ValueError) as caught:
            wrong()
        assert text in str(caught.value)
    wrong_entry: Any = 3
    with pytest.raises(ValueError, match="target 'x': expected an expression, a region or a list of regions, got 3"):
        resolve({"x": view}, {"x": wrong_entry}, Catalog.of(SOURCES))
