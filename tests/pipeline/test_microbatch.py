"""Microbatches, their weights, and outputs merged again."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.microbatch import TensorChunkSpec, sum_reducer
from torch.distributed.pipelining.microbatch import _Replicate as Replicate
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.cut.microbatch import (
    batch_size,
    loss_weights,
    merge_outputs,
    microbatch_sizes,
    shard_sizes,
    split_microbatches,
)
from torch_xmesh.pipeline.state.seeds import dropout_rng, dropout_seed


@given(st.integers(1, 50), st.integers(1, 50))
def test_sizes_are_tensor_splits(samples: int, count: int) -> None:
    if samples < count:
        with pytest.raises(ValueError, match=f"a batch of {samples} samples cannot be split into {count} microbatches"):
            microbatch_sizes(samples, count)
    else:
        assert microbatch_sizes(samples, count) == [len(part) for part in torch.arange(samples).tensor_split(count)]


@given(st.integers(0, 50), st.integers(1, 9))
def test_shards_are_dtensors(samples: int, count: int) -> None:
    chunks = [len(part) for part in torch.arange(samples).chunk(count)] if samples else []
    assert shard_sizes(samples, count) == chunks + [0] * (count - len(chunks))


@given(st.integers(1, 30), st.integers(1, 8), st.integers(0, 2))
def test_merging_undoes_splitting(samples: int, count: int, dim: int) -> None:
    shape = [2, 3, 4]
    shape[dim] = samples
    batch = {"x": torch.randn(shape), "flags": [torch.rand(shape) > 0.5, 7]}
    spec = TensorChunkSpec(dim)  # type: ignore[no-untyped-call]
    if samples < count:
        with pytest.raises(ValueError, match="cannot be split"):
            split_microbatches((batch,), num_microbatches=count, args_chunk_spec=(spec,))
        return
    parts = split_microbatches((batch,), num_microbatches=count, args_chunk_spec=(spec,))
    assert [part.num_samples for part in parts] == microbatch_sizes(samples, count)
    merged = merge_outputs([part.args[0] for part in parts], {"x": spec, "flags": spec})
    assert pytree.tree_all(lambda same: same, pytree.tree_map(_same, merged, batch))


def _same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return one == other


def test_constants_and_replicated_tensors_go_whole_to_every_microbatch() -> None:
    x, table, scalar = torch.randn(5, 2), torch.randn(3), torch.tensor(2.0)
    parts = split_microbatches(
        (x, table, scalar, "mode", None),
        {"factor": 3, "rows": torch.arange(5)},
        torch.arange(5),
        num_microbatches=2,
        args_chunk_spec=(None, Replicate, None, None, None),
    )
    for part in parts:
        assert part.args[1] is table
        assert part.args[2] is scalar
        assert part.args[3:] == ("mode", None)
        assert part.kwargs["factor"] == 3
        assert torch.equal(part.kwargs["rows"], part.target)
    assert [part.num_samples for part in parts] == [3, 2]
    assert batch_size((x,), {"rows": torch.arange(5)}) == 5
    assert batch_size((1, "mode")) is None


def test_wrong_batches_are_refused() -> None:
    x, y = torch.randn(4, 2), torch.randn(3, 2)
    with pytest.raises(ValueError, match=r"disagree on the number of samples: 4 in argument .*; 3 in argument"):
        split_microbatches((x, y), num_microbatches=2)
    with pytest.raises(ValueError, match="the target has 3 samples, the arguments have 4"):
        split_microbatches((x,), target=y, num_microbatches=2)
    with pytest.raises(ValueError, match="no tensor to cut"):
        split_microbatches((1,), num_microbatches=2)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        split_microbatches((x,), num_microbatches=0)
    with pytest.raises(ValueError, match=r"of shape \(4, 2\) has no dim 2"):
        split_microbatches((x,), num_microbatches=2, args_chunk_spec=(TensorChunkSpec(2),))  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="the chunk spec of args has 2 entries, args has 1"):
        split_microbatches((x,), num_microbatches=2, args_chunk_spec=(None, None))
    with pytest.raises(ValueError, match=r"the chunk spec of kwargs names \['z'\]"):
        split_microbatches((x,), {"y": 1}, num_microbatches=2, kwargs_chunk_spec={"z": TensorChunkSpec(0)})  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match=r"needs a tensor with dimensions, got int 3"):
        split_microbatches((x, 3), num_microbatches=2, args_chunk_spec=(None, TensorChunkSpec(0)))  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="is a TensorChunkSpec, a Replicate, None or a structure"):
        split_microbatches((x,), num_microbatches=2, args_chunk_spec=(0,))


def test_merging_follows_the_spec() -> None:
    outputs = [
        {"y": torch.ones(2, 1), "loss": torch.tensor(1.5), "k": 4},
        {"y": torch.ones(2, 2), "loss": torch.tensor(2.0), "k": 4},
    ]
    merged = merge_outputs(outputs, {"y": TensorChunkSpec(1), "loss": sum_reducer, "k": Replicate})  # type: ignore[no-untyped-call]
    assert merged["y"].shape == (2, 3)
    assert merged["loss"].item() == 3.5
    assert merged["k"] == 4
    assert torch.equal(merge_outputs([torch.tensor(1.0), torch.tensor(2.0)]), torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match="needs a tensor with dimensions"):
        merge_outputs([torch.tensor(1.0), torch.tensor(2.0)], TensorChunkSpec(0))  # type: ignore[no-untyped-call]
    with pytest.raises(ValueError, match="microbatch 1's output has the structure"):
        merge_outputs([torch.ones(1), (torch.ones(1),)])


def test_weights() -> None:
    assert loss_weights([3, 1]) == [0.75, 0.25]
    assert loss_weights([3, 1], scale_grads=False) == [1.0, 1.0]


def test_seeds_differ_and_the_global_generator_is_kept() -> None:
    seeds = {
        dropout_seed(seed=seed, step=step, stage=stage, microbatch=microbatch, data_shard=data_shard)
        for seed, step, stage, microbatch, data_shard in (
            (0, 0, 0, 0, 0),
            (1, 0, 0, 0, 0),
            (0, 1, 0, 0, 0),
            (0, 0, 1, 0, 0),
            (0, 0, 0, 1, 0),
            (0, 0, 0, 0, 1),
        )
    }
    assert len(seeds) == 6
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert dropout_seed(seed=1, step=2, stage=3, microbatch=4, data_shard=5) == 776076787286141139
    before = torch.random.get_rng_state()
    drawn = []
    for _ in range(2):
        with dropout_rng(7):
            drawn.append(torch.rand(3))
    assert torch.equal(*drawn)
    assert torch.equal(torch.random.get_rng_state(), before)
