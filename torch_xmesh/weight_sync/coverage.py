"""Whether every element of a target is filled exactly once.

Views are decoded into boxes of their target (``memory.py``), and boxes are compared: the work is by regions, not by
elements. Only where a view is no box its target's elements are counted, one target at a time.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import torch

from torch_xmesh.weight_sync.boxes import Box, box_text, intersection, volume, whole_box, without
from torch_xmesh.weight_sync.memory import box_of_view, byte_range, cells_of, share_memory, shares_with_itself
from torch_xmesh.weight_sync.mistakes import Mistakes


@dataclasses.dataclass(frozen=True)
class Claim:
    """A view of memory that something fills; ``label`` says what: ``'q.weight' [0:4, 0:8]``."""

    label: str
    view: torch.Tensor


def check_coverage(what: str, target: torch.Tensor, claims: Sequence[Claim], mistakes: Mistakes) -> None:
    """Adds a line for each part of a target that nothing fills, that two fill, and for each view of other memory.

    Args:
        what: the target's name, for the lines.
        target: this process's memory of it.
        claims: what fills it, none of them empty.
        mistakes: gets the lines.
    """
    if target.numel() == 0:
        for claim in claims:
            mistakes.add(f"{what} is empty, but {claim.label} fills memory there")
        return
    boxes = [box_of_view(claim.view, target) for claim in claims]
    known = [box for box in boxes if box is not None]
    if len(known) < len(boxes):
        _count(what, target, claims, mistakes)
        return
    whole = whole_box(target.shape)
    missing = [whole]
    for box in sorted(known):
        missing = without(missing, box)
    for box in missing:
        mistakes.add(f"{what} {box_text(box)} is covered by nothing")
    if sum(map(volume, known)) + sum(map(volume, missing)) != volume(whole):
        _add_doubled(what, list(zip(known, claims, strict=True)), mistakes)


def check_apart(targets: Sequence[tuple[str, torch.Tensor]], mistakes: Mistakes) -> None:
    """Adds a line for each two targets, by name and memory, that have some memory in common. Empty ones have none."""
    ranges = sorted(
        ((str(memory.device), *byte_range(memory), name, memory) for name, memory in targets if memory.numel()),
        key=lambda entry: entry[:4],
    )
    open_ones: list[tuple[str, int, int, str, torch.Tensor]] = []
    for entry in ranges:
        device, begin, _, name, memory = entry
        open_ones = [other for other in open_ones if other[0] == device and other[2] > begin]
        for _, _, _, other_name, other in open_ones:
            if share_memory(other, memory):
                mistakes.add(
                    f"targets {other_name!r} and {name!r} share memory but are not the same: expected one of them, "
                    "or both with one shape and strides"
                )
        open_ones.append(entry)


def _add_doubled(what: str, claimed: list[tuple[Box, Claim]], mistakes: Mistakes) -> None:
    for (box, one), (other_box, other) in itertools.combinations(claimed, 2):
        common = intersection(box, other_box)
        if common is not None:
            mistakes.add(f"{what} {box_text(common)} is covered twice: by {one.label} and by {other.label}")


def _count(what: str, target: torch.Tensor, claims: Sequence[Claim], mistakes: Mistakes) -> None:
    """By elements, or parts of such that views have: which claim has each first.

    Takes 4 bytes for each that the target spans, and as much for those of one view.
    """
    if shares_with_itself(target):
        mistakes.add(f"{what} has elements that share memory (strides {target.stride()}): nothing can cover it once")
        return
    begin, end = byte_range(target)
    views = [claim.view for claim in claims]
    unit = math.gcd(target.itemsize, *(view.itemsize for view in views), *(view.data_ptr() - begin for view in views))
    nobody, outside = -1, -2
    owner = torch.full(((end - begin) // unit,), outside, dtype=torch.int32)
    cells_of(target, owner, begin, unit).fill_(nobody)
    for index, claim in enumerate(claims):
        view_begin, view_end = byte_range(claim.view)
        if claim.view.device != target.device or view_begin < begin or view_end > end:
            mistakes.add(f"{what}: {claim.label} goes to memory that is not the target's")
            continue
        if shares_with_itself(claim.view):
            mistakes.add(f"{what}: {claim.label} goes to memory whose elements share memory")
            continue
        mine = cells_of(claim.view, owner, begin, unit)
        before = mine.clone()
        if bool((before == outside).any()):
            mistakes.add(f"{what}: {claim.label} goes to memory that is not the target's")
        for other in torch.bincount(before[before >= 0]).nonzero().flatten().tolist():
            common = torch.zeros(owner.shape, dtype=torch.bool)
            cells_of(claim.view, common, begin, unit).copy_(before == other)
            first, number = _where(common, target, unit)
            mistakes.add(
                f"{what} is covered twice, in {number} from index {first}: by {claims[other].label} and by "
                f"{claim.label}"
            )
        mine.masked_fill_(before == nobody, index)
    missing = owner == nobody
    if bool(missing.any()):
        first, number = _where(missing, target, unit)
        mistakes.add(f"{what} is covered by nothing in {number}, from index {first}")


def _where(cells: torch.Tensor, target: torch.Tensor, unit: int) -> tuple[tuple[int, ...], str]:
    """Which of the target's elements have true cells: the first one's index, and in words how many there are."""
    in_order = cells_of(target, cells, byte_range(target)[0], unit).any(dim=-1).flatten().nonzero().flatten()
    index: list[int] = []
    rest = int(in_order[0])
    for size in reversed(target.shape):
        rest, place = divmod(rest, size)
        index.insert(0, place)
    return tuple(index), "1 element" if in_order.numel() == 1 else f"{in_order.numel()} elements"
