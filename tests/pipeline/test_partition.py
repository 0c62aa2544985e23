"""Stages run one after another equal the whole model: outputs bitwise, gradients over one autograd graph, buffers."""

import copy

import pytest
import torch
from models import Case, cases, small
from partition_cases import SPLITS, assert_same, cut, gradients, twin

from torch_xmesh.pipeline.cut.partition import partition, split_at


@pytest.mark.parametrize(("case", "names"), SPLITS)
@pytest.mark.parametrize("samples", [3, 5])
def test_stages_equal_the_model(case: Case, names: tuple[str, ...], samples: int) -> None:
    torch.manual_seed(0)
    whole = case.build()
    split = twin(case, whole)
    parts = cut(case, split, names)
    assert parts.num_stages == len(names) + 1
    args, kwargs, target = case.batch(samples)
    results = []
    for run in (whole, parts.run):
        torch.manual_seed(1)
        output = run(*args, **kwargs)
        case.loss(output, target).backward()  # type: ignore[no-untyped-call]
        results.append(output)
    assert_same(results[0], results[1])
    assert_same(list(gradients(whole).values()), list(gradients(split).values()))
    assert_same(dict(whole.named_buffers()), dict(split.named_buffers()))


@pytest.mark.parametrize(("case", "names"), SPLITS)
def test_values_are_what_the_stages_make(case: Case, names: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = case.build()
    parts = cut(case, model, names)
    for samples in (3, 4):
        args, kwargs, _ = case.batch(samples)
        values = parts.bind(args, kwargs)
        for stage in parts.stages:
            received = [values[name] for name in stage.input_values]
            values.update(zip(stage.output_values, stage(*received), strict=True))
        assert set(values) == set(parts.values)
        for name, value in values.items():
            info = parts.values[name]
            assert tuple(value.shape) == info.shape_for(samples)
            assert value.dtype == info.dtype
            assert value.requires_grad == info.requires_grad or info.is_output
            assert info.batch_dim is None or value.shape[info.batch_dim] % samples == 0
    for stage in parts.stages:
        for name in stage.input_values:
            assert parts.values[name].producer != stage.index
            assert stage.index in parts.values[name].consumers


@pytest.mark.parametrize(("case", "names"), SPLITS)
def test_detached_stages_give_the_models_gradients(case: Case, names: tuple[str, ...]) -> None:
    """As an engine runs them: every input a leaf, gradients handed from consumers to producers and summed."""
    torch.manual_seed(0)
    whole = case.build()
    split = twin(case, whole)
    parts = cut(case, split, names)
    args, kwargs, target = case.batch(3)
    torch.manual_seed(1)
    case.loss(whole(*args, **kwargs), target).backward()  # type: ignore[no-untyped-call]
    torch.manual_seed(1)
    values = parts.bind(args, kwargs)
    ran = []
    for stage in parts.stages:
        received = [values[name].detach() for name in stage.input_values]
        for name, tensor in zip(stage.input_values, received, strict=True):
            tensor.requires_grad_(parts.values[name].is_differentiable)
        made = stage(*received)
        values.update(zip(stage.output_values, made, strict=True))
        ran.append((stage, received, made))
    loss = case.loss(parts.outputs.unflatten(values), target)
    incoming: dict[str, torch.Tensor] = {}
    for stage, received, made in reversed(ran):
        if stage.index == parts.num_stages - 1:
            loss.backward()  # type: ignore[no-untyped-call]
        else:
            roots = [
                (tensor, incoming[name])
                for name, tensor in zip(stage.output_values, made, strict=True)
                if name in incoming
            ]
            torch.autograd.backward([tensor for tensor, _ in roots], [gradient for _, gradient in roots])
        for name, tensor in zip(stage.input_values, received, strict=True):
            if tensor.grad is not None and parts.values[name].producer is not None:
                incoming[name] = incoming[name] + tensor.grad if name in incoming else tensor.grad
    assert gradients(whole).keys() == gradients(split).keys()
    for name, expected in gradients(whole).items():
        found = gradients(split)[name]
        assert (found is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_a_model_on_meta_is_cut_alike(case: Case) -> None:
    names = case.splits[-1]
    real = cut(case, case.build(), names)
    with torch.device("meta"):
        model = case.build()
    meta = cut(case, model, names)
    assert str(meta) == str(real)
    assert [stage.parameter_names() for stage in meta.stages] == [stage.parameter_names() for stage in real.stages]


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_cutting_changes_nothing(case: Case) -> None:
    torch.manual_seed(0)
    model = case.build()
    before = copy.deepcopy(model.state_dict())
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    args, kwargs, _ = case.batch(3)
    state = torch.random.get_rng_state()
    partition(model, args, kwargs, split_at(*case.splits[0]), args_chunk_spec=case.specs.get("args_chunk_spec"))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert_same(before, model.state_dict())
    assert attributes == {name: set(module.__dict__) for name, module in model.named_modules()}
    assert not isinstance(model, small.Hooked) or model.calls == []


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_parameters_and_buffers_keep_their_names(case: Case) -> None:
    model = case.build()
    for names in case.splits:
        parts = cut(case, model, names)
        known = {id(tensor): name for name, tensor in model.state_dict(keep_vars=True).items()}
        every = dict(model.state_dict(keep_vars=True))
        held = set()
        for stage in parts.stages:
            for name, tensor in stage.module.state_dict(keep_vars=True).items():
                assert every[name] is tensor
                held.add(id(tensor))
        assert {known[key] for key in set(known) - held} == set(parts.unused_parameters)


def test_one_stage() -> None:
    case = next(case for case in cases() if case.name == "bert")
    model = case.build()
    args, kwargs, _ = case.batch(3)
    parts = partition(model, args, kwargs)
    assert parts.num_stages == 1
    assert_same(parts.run(*args, **kwargs), model(*args, **kwargs))
