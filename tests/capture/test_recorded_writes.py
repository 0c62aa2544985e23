"""What a forward writes to is known, whatever its operators are called and say of themselves."""

from __future__ import annotations

import copy

import pytest
import torch
from recorded_cases import record_opened
from torch import nn
from writing_models import WRITES, Writing

from torch_xmesh.pipeline.cut.partition import partition, split_at


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_is_recorded(name: str) -> None:
    """As a run shows it."""
    write, expected = WRITES[name]
    torch.manual_seed(0)
    model = Writing(write)
    x = torch.randn(8, 4)
    recording = record_opened(model, (x,))
    before = {key: one.clone() for key, one in model.state_dict().items()}
    model(x)
    changed = {key for key, one in model.state_dict().items() if not torch.equal(one, before[key])}
    assert changed == expected
    assert set(recording.changed_tensors) == expected


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("is_inside", [False, True])
def test_stages_write_as_the_model(name: str, is_inside: bool) -> None:
    """Between the modules that no stage cuts, and inside of one."""
    write, _ = WRITES[name]
    torch.manual_seed(0)
    model: nn.Module = Writing(write)
    if is_inside:
        model = nn.Sequential(model, nn.Linear(4, 4))
    whole = copy.deepcopy(model)
    parts = partition(model, (torch.randn(8, 4),), None, split_at("1" if is_inside else "last"))
    for _ in range(3):
        x = torch.randn(8, 4)
        torch.testing.assert_close(parts.run(x), whole(x))
    for key, one in whole.state_dict().items():
        assert torch.equal(model.state_dict()[key], one), key
