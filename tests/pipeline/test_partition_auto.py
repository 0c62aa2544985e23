"""Splits chosen by measured time and memory."""

import pickle

import pytest
import torch
from models import cases
from models.libraries import MODELS
from partition_cases import assert_same, cut
from torch import nn

from torch_xmesh.pipeline.cut.balance import balance
from torch_xmesh.pipeline.cut.partition import SplitAt
from torch_xmesh.pipeline.cut.profile_memory import UnitCost
from torch_xmesh.pipeline.cut.split_choice import choose_split


def test_balance_is_optimal_and_keeps_the_memory_limit() -> None:
    seconds = [5.0, 1.0, 1.0, 1.0, 4.0, 2.0]
    units = [UnitCost(str(index), value, {index: 10}, {index: 1}) for index, value in enumerate(seconds)]
    assert balance(units, 3, None, [1] * 3) == [1, 4]
    assert balance(units, 3, 90, [1] * 3) == [2, 4]
    with pytest.raises(ValueError, match="no split into 3 stages keeps memory_limit_bytes=80"):
        balance(units, 3, 80, [1] * 3)
    with pytest.raises(ValueError, match="fewer than 7 stages"):
        balance(units, 7, None, [1] * 7)


@pytest.mark.parametrize("name", ["gpt", "unet", "export", "lstm", "moe"])
def test_auto_gives_a_split_that_works(name: str) -> None:
    case = next(case for case in cases() if case.name == name)
    torch.manual_seed(0)
    model = case.build()
    args, kwargs, _ = case.batch(3)
    split = choose_split(model, args, kwargs, 3, args_chunk_spec=case.specs.get("args_chunk_spec"))
    assert pickle.loads(pickle.dumps(split)) == split
    parts = cut(case, model, split.names)
    assert parts.num_stages == 3
    results = []
    for run in (model, parts.run):
        torch.manual_seed(1)
        results.append(run(*args, **kwargs))
    assert_same(*results)


def test_auto_opens_modules_and_balances_on_meta() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Sequential(*(nn.Linear(32, 32) for _ in range(8))), nn.Linear(32, 1))
    assert choose_split(model, (torch.empty(4, 32, device="meta"),), None, 4) == SplitAt(("0.2", "0.4", "0.6"))


class Residual(nn.Module):
    """Computes after the module that it calls."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.inner(x)
        return result


class Shaped(nn.Module):
    """torch.fx cannot trace it, torch.export can."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Residual() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] > 4:
            for block in self.blocks:
                x = block(x)
        return x


def test_a_stage_of_an_exported_graph_starts_where_its_module_begins() -> None:
    model, x = Shaped(), torch.ones(4, 8)
    assert choose_split(model, (x,), None, 3) == SplitAt(("blocks.1.inner", "blocks.2.inner"))
    with pytest.raises(ValueError, match="fewer than 4 stages"):
        choose_split(model, (x,), None, 4)


@pytest.mark.filterwarnings("ignore:.*use_cache is switched off")
def test_auto_opens_a_model_of_transformers_as_it_comes() -> None:
    """Its cache, which layers hand on, is on by default."""
    pytest.importorskip("transformers")
    case = MODELS["Llama"]
    split = choose_split(case.as_it_comes(num_hidden_layers=3), (), case.batch(2, num_padded=0), 3)
    assert len(split.names) == 2
    assert all(name.startswith("model.") for name in split.names)
