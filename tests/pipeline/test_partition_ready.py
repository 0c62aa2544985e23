"""Ready stage modules: a chain, in one process or several."""

import pickle

import pytest
import torch
from models import small
from torch import nn

from torch_xmesh.pipeline.cut.partition import partition
from torch_xmesh.pipeline.cut.ready import StageSignature


def ready_stages() -> list[nn.Module]:
    torch.manual_seed(0)
    return [
        small.TwoOutputs(6),
        nn.Bilinear(6, 6, 5),
        nn.Sequential(nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Linear(5, 3)),
    ]


def test_ready_stages_are_a_chain() -> None:
    stages = ready_stages()
    parts = partition(list(stages), (torch.randn(3, 6),), num_stages=3)
    x = torch.randn(4, 6)
    assert torch.equal(parts.run(x), stages[2](stages[1](*stages[0](x))))
    assert [stage.input_values for stage in parts.stages] == [("arg0",), ("stage0.0", "stage0.1"), ("stage1.0",)]
    assert parts.values["stage0.1"].shape_for(7) == (7, 6)
    leaf = stages[1](*stages[0](x)).detach().requires_grad_()
    parts.stages[2](leaf)[0].sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None


def test_ready_stages_of_several_processes_agree() -> None:
    stages, published = ready_stages(), {}

    def exchange(stage: int, signature: StageSignature | ValueError | None) -> StageSignature:
        if signature is not None:
            published[stage] = pickle.dumps(signature)
        return pickle.loads(published[stage])  # type: ignore[no-any-return]

    x = torch.randn(3, 6)
    whole = partition(list(stages), (x,))
    partition(list(stages), (x,), exchange=exchange)
    for own in range(3):
        parts = partition(
            [stage if index == own else None for index, stage in enumerate(stages)], (x,), exchange=exchange
        )
        assert list(parts.values.values()) == list(whole.values.values())
        assert parts.outputs == whole.outputs
    with pytest.raises(ValueError, match=r"stages \[1\] are None"):
        partition([stages[0], None, stages[2]], (x,))
