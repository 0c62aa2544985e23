"""Models and arguments that cannot be cut or bound: each refusal says what and where."""

import pytest
import torch
from models import cases, small
from partition_cases import cut
from torch import nn

from torch_xmesh.pipeline.cut.partition import partition, split_at


def test_wrong_split_points() -> None:
    model = small.MLP()
    x = torch.randn(3, 6)
    with pytest.raises(ValueError, match=r"split point 'layer.2' is no module of MLP; close names: .*layers\.2"):
        partition(model, (x,), None, split_at("layer.2"))
    with pytest.raises(
        ValueError, match=r"must be in the order of the model's calls: 'layers.1' is called before 'layers.2'"
    ):
        partition(model, (x,), None, split_at("layers.2", "layers.1"))
    with pytest.raises(ValueError, match=r"stage 0 would be empty: nothing runs before 'layers.0'"):
        partition(model, (x,), None, split_at("layers.0"))
    with pytest.raises(ValueError, match="'unused' is never called"):
        partition(small.Several(), ((torch.randn(3, 4), torch.randn(3, 4)),), None, split_at("unused"))
    with pytest.raises(ValueError, match=r'names of modules, got 2 \(int\): did you mean split_at\("2"\)\?'):
        split_at(2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"example_args is a tuple .* got Tensor: pass \(x,\)"):
        partition(model, x, None, split_at("layers.1"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="example_args is missing"):
        partition(model, split=split_at("layers.1"))
    with pytest.raises(ValueError, match=r"makes 2 stages, but there are 3 meshes"):
        partition(model, (x,), None, split_at("layers.1"), num_stages=3)
    with pytest.raises(ValueError, match="makes 2 stages, but there are 3 meshes"):
        partition([nn.Linear(6, 6), nn.Linear(6, 6)], (x,), num_stages=3)
    with pytest.raises(ValueError, match="split must be None where the model is a list"):
        partition([nn.Linear(6, 6)], (x,), None, split_at("0"))
    with pytest.raises(ValueError, match="split must be split_at"):
        partition(model, (x,), None, "half")


def test_a_model_that_looks_at_its_data_says_where() -> None:
    with pytest.raises(
        ValueError,
        match=r"the model reads values \(__bool__\) of what gt is.*at .*small.py:\d+ in forward.*ready stage modules",
    ):
        partition(small.Untraceable(), (torch.randn(3, 4),), None, split_at("second"))


def test_a_failing_module_says_where() -> None:
    with pytest.raises(
        ValueError,
        match=r"MLP cannot be recorded: module 'layers.0' \(Linear\) fails at .*small.py:\d+ in forward.*cannot be mul",
    ):
        partition(small.MLP(), (torch.randn(3, 5),), None, split_at("layers.1"))


def test_hooks_on_an_opened_module_are_refused() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 4))
    model[0].register_forward_hook(lambda module, args, output: output)
    with pytest.raises(ValueError, match=r"a stage starts inside module '0' \(Sequential\), which has hooks"):
        partition(model, (torch.randn(3, 4),), None, split_at("0.1"))


def test_arguments_that_differ_from_the_example_are_refused() -> None:
    case = next(case for case in cases() if case.name == "several")
    parts = cut(case, case.build(), case.splits[0])
    args, kwargs, _ = case.batch(5)
    parts.bind(args, kwargs)
    with pytest.raises(
        ValueError, match=r"argument .*scale.* is a constant of the captured model: the example had 0.5, got 2.0"
    ):
        parts.bind(args, {"scale": 2.0})
    with pytest.raises(
        ValueError,
        match=r"argument args\[0\]\[1\] has shape \(5, 3\), the example had \(3, 4\) \(dim 0, the batch, may differ\)",
    ):
        parts.bind(((args[0][0], torch.randn(5, 3)),), kwargs)
    with pytest.raises(ValueError, match=r"args\[0\]\[0\] has dtype torch.float64, the example had torch.float32"):
        parts.bind(((args[0][0].double(), args[0][1]),), kwargs)
    with pytest.raises(ValueError, match=r"argument args\[0\] is one value, the example's was a tuple of 2"):
        parts.bind((args[0][0],), kwargs)
    assert set(parts.bind(args, kwargs, stage=0)) == {"pair_0"}
