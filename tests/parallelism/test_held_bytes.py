"""What devices hold: against what autograd keeps, and what shardings that hold less cost."""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from library_arguments import made
from shardings import shard_stretch
from small_models import Gpt, Mlp
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import torch_xmesh as xm
from torch_xmesh.parallelism.compute import Compute
from torch_xmesh.parallelism.graph import ShardingGraph
from torch_xmesh.parallelism.loops import Choice
from torch_xmesh.parallelism.operators import Operator
from torch_xmesh.parallelism.recorded_forwards import forward_of
from torch_xmesh.parallelism.sharded import Sharded
from torch_xmesh.parallelism.space import Space
from torch_xmesh.parallelism.stretch import Stretch
from torch_xmesh.parallelism.trade import trade_offs, variants
from torch_xmesh.parallelism.zero import with_zero

COMPUTE = Compute(1e12, 1e11)
ALONE = [(1, 0.0, 0.0)]
FOUR = [(4, 1.0, 1.0)]
TOKENS = torch.zeros(8, 16, dtype=torch.int64)


def kept_by_autograd(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Bytes of the storages that backward needs, those of parameters and arguments left out."""
    given = {one.untyped_storage().data_ptr() for one in [*model.parameters(), *model.buffers()]}
    held: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in given:
            held[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model(*args, **kwargs)
    return sum(storage.nbytes() for storage in held.values())


_LARGER: dict[str, dict[str, int]] = {
    "Llama": {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 96},
    "T5": {"d_model": 64, "d_kv": 16, "d_ff": 128, "vocab_size": 96},
}
"""So that what is not counted, masks and statistics, is small beside what is."""


@pytest.mark.parametrize("name", ["GPT", "GPT-2", "Llama", "BERT", "ViT", "T5", "ResNet-50"])
def test_what_backward_keeps(name: str) -> None:
    """Within a fifth of what autograd keeps: of masks and statistics only the large ones are counted."""
    is_ours = name == "GPT"
    model, args, kwargs = (Gpt(), (TOKENS,), {}) if is_ours else made(name, **_LARGER.get(name, {}))
    sharded = shard_stretch(Stretch.of(forward_of(model, args, kwargs)), Space(ALONE, "ring"))
    assert sharded.bytes.per_microbatch == pytest.approx(kept_by_autograd(model, args, kwargs), rel=0.2)
    size = sum(one.numel() * one.element_size() for one in model.parameters())
    assert sharded.bytes.gradients == pytest.approx(size, rel=1e-6)
    assert sharded.bytes.states == pytest.approx(2 * size, rel=1e-6)


class Checkpointed(nn.Module):
    """Backward computes it once more; what it was given is noted."""

    given: ClassVar[list[torch.Tensor]] = []

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        self.given.append(x)
        return checkpoint(self.inner, x, use_reentrant=False)


def test_what_backward_keeps_with_checkpoints() -> None:
    """For a checkpointed layer backward keeps only the layer's inputs. torch's checkpoint keeps these itself, where
    saved-tensor hooks do not see them."""
    model, tokens = Gpt(num_layers=3), torch.zeros(8, 16, dtype=torch.int64)
    usual = shard_stretch(Stretch.of(forward_of(model, (tokens,))), Space(ALONE, "ring", compute=COMPUTE))
    checkpointed = Gpt(num_layers=3)
    checkpointed.layers = nn.Sequential(*[Checkpointed(layer) for layer in checkpointed.layers.children()])
    sharded = shard_stretch(Stretch.of(forward_of(checkpointed, (tokens,))), Space(ALONE, "ring", compute=COMPUTE))
    del Checkpointed.given[:]
    kept = kept_by_autograd(checkpointed, (tokens,), {}) + sum(one.nbytes for one in Checkpointed.given)
    assert sharded.bytes.per_microbatch == pytest.approx(kept, rel=0.2)
    assert sharded.bytes.per_microbatch < usual.bytes.per_microbatch / 4
    x = torch.randn(8, 16, model.tokens.embedding_dim, requires_grad=True)
    inside = kept_by_autograd(next(model.layers.children()), (x,), {}) - x.nbytes
    assert sharded.bytes.again == pytest.approx(inside, rel=0.2), "of one layer: the others' are not there yet, or gone"
    assert usual.bytes.again == 0
    assert sharded.seconds.forward == usual.seconds.forward
    again = sharded.seconds.backward - usual.seconds.backward
    assert 0.5 * usual.seconds.forward < again < usual.seconds.forward


def test_what_is_computed_anew_counts_for_a_limit() -> None:
    """The least that a plan needs is what its devices hold with a checkpoint computed anew, and a plan that is found
    within a limit keeps it so."""
    model, x = nn.Sequential(*[Checkpointed(Mlp(16, 4)) for _ in range(2)]), torch.zeros(512, 16)
    options: dict[str, Any] = {"compute": COMPUTE, "num_microbatches": 2}
    alone = xm.plan_parallel(model, (x,), devices=xm.Mesh([0]), **options)
    (stage,) = alone.stages
    assert stage.bytes.again == 3 * x.nbytes, "what its second to last linear are given"
    assert stage.peak_bytes == pytest.approx(stage.bytes.fixed + stage.in_flight * stage.bytes.per_microbatch, abs=1)
    with pytest.raises(ValueError, match=rf"the smallest limit that one keeps is {stage.peak_bytes}\b"):
        xm.plan_parallel(model, (x,), devices=xm.Mesh([0]), memory_limit_bytes=stage.peak_bytes - 1, **options)
    limit = round(0.6 * stage.peak_bytes)
    for found in xm.plan_parallel(model, (x,), devices=xm.Mesh(range(4)), memory_limit_bytes=limit, **options).stages:
        assert found.bytes.again > 0
        assert found.bytes.total(found.in_flight) <= limit
    assert "of a checkpoint computed anew" in str(alone)


def test_parameters_in_parts_are_whole_while_a_checkpoint_is_computed_anew() -> None:
    space = Space(FOUR, "ring", allowed=by_batch)
    model = nn.Sequential(*[Checkpointed(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)))] * 2)
    plain = shard_stretch(Stretch.of(forward_of(model, (torch.zeros(64, 32),))), space)
    third = with_zero(plain, 3)
    assert plain.bytes.again == 64 * 32 * 4 / 4
    assert third.bytes.again == plain.bytes.again + 2 * (32 * 32 + 32) * 4


class SeenFrom(nn.Module):
    """Operators keep views of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.turned = nn.MultiheadAttention(32, 2, batch_first=True), nn.Parameter(torch.zeros(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.turned.t())
        out: torch.Tensor = self.attention(y, y[:, :4], y[:, :4])[0]
        return out


def test_parameters_of_which_views_are_kept_stay_whole() -> None:
    """A microbatch could not let go of them between its forward and its backward."""
    options: dict[str, Any] = {"devices": xm.Mesh(range(4)), "compute": COMPUTE, "num_microbatches": 2, "num_layers": 1}
    plan = xm.presets.zero_3(SeenFrom(), (torch.zeros(8, 16, 32, requires_grad=True),), **options)
    levels = {one.name: one.zero_level for one in plan.stages[0].parameters}
    assert {name for name, level in levels.items() if level == 2} == {"turned", "attention.in_proj_weight"}
    assert levels["attention.out_proj.weight"] == 3
    plan = xm.presets.zero_3(Checkpointed(SeenFrom()), (torch.zeros(8, 16, 32, requires_grad=True),), **options)
    assert {one.zero_level for one in plan.stages[0].parameters} == {3}, "a checkpoint keeps none"


def kinds(sharded: Sharded) -> Counter[str]:
    return Counter(f"{use.why} {use.collective}" for use in sharded.collectives)


def by_batch(operator: Operator, choice: Choice) -> bool:
    """Samples are sharded."""
    return choice.axes == (operator.loops.outputs[0][0],)


def test_zero_collectives() -> None:
    """Collectives for one parameter in a step of one microbatch, as in Alpa's tests: ZeRO-2 has a reduce-scatter and an
    all-gather, ZeRO-3 a reduce-scatter and two all-gathers, or one all-gather where backward does not read the
    parameter."""
    space = Space(FOUR, "ring", allowed=by_batch)
    model = nn.Linear(32, 32, bias=False)
    plain = shard_stretch(Stretch.of(forward_of(model, (torch.zeros(4096, 32, requires_grad=True),))), space)
    assert kinds(plain) == {"gradient all-reduce": 1}
    size = 32 * 32 * 4
    wanted = {
        1: ({"gradient reduce-scatter": 1, "parameter all-gather": 1}, (size, size, 2 * size / 4)),
        2: ({"backward reduce-scatter": 1, "parameter all-gather": 1}, (size, size / 4, 2 * size / 4)),
        3: (
            {"backward reduce-scatter": 1, "forward all-gather": 1, "backward all-gather": 1},
            (size / 4, size / 4, 2 * size / 4),
        ),
    }
    for level, (collectives, held) in wanted.items():
        found = with_zero(plain, level)
        assert kinds(found) == collectives
        assert (found.bytes.parameters, found.bytes.gradients, found.bytes.states) == held
        assert found.zero_levels == {"weight": level}
        assert found.zero_states == {"weight": (0,)}
        assert found.cost == pytest.approx(space.cost(found.seconds))
    assert with_zero(plain, 1).cost == pytest.approx(plain.cost)
    first = shard_stretch(Stretch.of(forward_of(model, (torch.zeros(4096, 32),))), space)
    assert kinds(with_zero(first, 3)) == {"backward reduce-scatter": 1, "forward all-gather": 1}


def test_zero_where_it_pays() -> None:
    """Where a reduce-scatter takes as long as an all-reduce, level 1 takes longer and is left; a bias that does not
    divide stays whole; what is sharded already has no summands."""
    gloo = Space(FOUR, "gloo", allowed=by_batch)
    model = nn.Linear(32, 30)
    plain = shard_stretch(Stretch.of(forward_of(model, (torch.zeros(4096, 32),))), gloo)
    left = with_zero(plain, 1)
    assert (left.zero_levels, left.cost) == ({}, plain.cost)
    assert set(with_zero(plain, 3).zero_levels) == {"weight"}
    ring = Space(FOUR, "ring")
    split = shard_stretch(Stretch.of(forward_of(Mlp(256, 2), (torch.zeros(32, 256),))), ring)
    assert with_zero(split, 3).zero_levels == {}
    with pytest.raises(ValueError, match=r"a level of ZeRO is one of \(1, 2, 3\), got 4"):
        with_zero(plain, 4)


def test_microbatches_make_gradients_cheap_and_level_3_dear() -> None:
    model, x = Mlp(64, 2), torch.zeros(4096, 64)
    one, many = (Space(FOUR, "ring", num_microbatches=number, allowed=by_batch) for number in (1, 8))
    found = [shard_stretch(Stretch.of(forward_of(model, (x,))), space) for space in (one, many)]
    assert found[0].cost == pytest.approx(8 * found[1].cost)
    third = [with_zero(sharded, 3) for sharded in found]
    assert third[1].cost == pytest.approx(third[0].cost), "each microbatch fetches its parameters"


def test_trade_offs_hold_less_and_cost_more() -> None:
    """And no sharding found at any price is better than what lies between two of them."""
    space = Space([(2, 1e-5, 1e-9), (2, 1e-6, 1e-10)], "ring", compute=Compute(1e12, 1e11), num_microbatches=4)
    stretch = Stretch.of(forward_of(Gpt(), (torch.zeros(64, 16, dtype=torch.int64),)))
    graph = ShardingGraph(stretch, space)
    found = trade_offs(graph, 4)
    assert len(found) > 1
    for before, after in itertools.pairwise(found):
        assert after.bytes.total(4) < before.bytes.total(4)
        assert after.cost > before.cost
    all_of_them = variants(graph, 4)
    assert all_of_them[0].cost == pytest.approx(min(one.cost for one in all_of_them))
    assert min(one.bytes.total(4) for one in all_of_them) <= found[-1].bytes.total(4)


def test_what_is_made_for_others_is_held() -> None:
    """Logits are, though no operator's backward needs them."""
    model = nn.Sequential(nn.Embedding(1000, 16), nn.Linear(16, 1000))
    sharded = shard_stretch(
        Stretch.of(forward_of(model, (torch.zeros(8, 4, dtype=torch.int64),))), Space(ALONE, "ring")
    )
    logits = 8 * 4 * 1000 * 4
    assert sharded.bytes.per_microbatch == logits + 8 * 4 * 16 * 4 + 8 * 4 * 8
