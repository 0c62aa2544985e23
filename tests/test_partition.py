"""Stages run one after another equal the whole model: outputs bitwise, gradients over one autograd graph, buffers."""

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).parent))

from models import Case, cases, small, vision

from torch_xmesh.pipeline.partition import Partition, SplitAt, partition, split_at
from torch_xmesh.pipeline.partition_ready import StageSignature
from torch_xmesh.pipeline.profile import UnitCost, balance, choose_split
from torch_xmesh.testing.serial import serial_step

SPLITS = [pytest.param(case, names, id=f"{case.name}-{'-'.join(names)}") for case in cases() for names in case.splits]


def cut(case: Case, model: nn.Module, names: tuple[str, ...], samples: int = 3) -> Partition:
    args, kwargs, _ = case.batch(samples)
    return partition(model, args, kwargs, split_at(*names), args_chunk_spec=case.specs.get("args_chunk_spec"))


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(one: Any, other: Any) -> None:
    flat, structure = pytree.tree_flatten(one)
    flat_other, structure_other = pytree.tree_flatten(other)
    assert structure == structure_other
    for mine, theirs in zip(flat, flat_other, strict=True):
        if isinstance(mine, torch.Tensor):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)
        else:
            assert mine == theirs


@pytest.mark.parametrize(("case", "names"), SPLITS)
@pytest.mark.parametrize("samples", [3, 5])
def test_stages_equal_the_model(case: Case, names: tuple[str, ...], samples: int) -> None:
    torch.manual_seed(0)
    whole = case.build()
    split = copy.deepcopy(whole)
    if case.name == "hooks":
        split = small.Hooked()
        split.load_state_dict(whole.state_dict())
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
    split = copy.deepcopy(whole)
    if case.name == "hooks":
        split = small.Hooked()
        split.load_state_dict(whole.state_dict())
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
    if case.name == "moe":
        with pytest.raises(ValueError, match=r"node experts_0 \(call_module experts.0\).*cannot be found"):
            cut(case, model, names)
        return
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


def test_tied_parameters_are_groups() -> None:
    gpt = next(case for case in cases() if case.name == "gpt")
    parts = cut(gpt, gpt.build(), ("blocks.1", "blocks.2", "head"))
    assert parts.tied_parameters == [[(0, "tokens.weight"), (3, "head.weight")]]
    tied = next(case for case in cases() if case.name == "tied")
    parts = cut(tied, tied.build(), ("second", "third", "last"))
    assert parts.tied_parameters[0] == [(0, "first.weight"), (1, "second.weight"), (2, "first.weight")]
    assert [(1, "shared.weight"), (2, "shared.weight")] in parts.tied_parameters


def test_skips_go_straight_to_their_consumers() -> None:
    case = next(case for case in cases() if case.name == "unet")
    parts = cut(case, case.build(), ("encoders.1", "attention", "decoders.0", "head"))
    first = parts.values["encoders_0"]
    assert (first.producer, first.consumers) == (0, (3,))
    assert "encoders_0" not in parts.stages[1].input_values + parts.stages[2].input_values
    second = parts.values["encoders_1"]
    assert (second.producer, second.consumers) == (1, (2,))


def test_masks_reach_every_stage_from_the_input() -> None:
    case = next(case for case in cases() if case.name == "bert")
    parts = cut(case, case.build(), ("layers.0", "layers.2", "pooler"))
    assert parts.inputs["mask"].stages == (1, 2)
    assert parts.values["mask"].dtype == torch.bool
    assert not parts.values["mask"].is_differentiable
    assert parts.stages[0].model_inputs == ("indices", "kinds")
    assert parts.outputs.unflatten({name: name for name in parts.outputs.names})["width"] == 8  # type: ignore[misc]
    embedded = [value for value in parts.values.values() if value.is_output and value.producer == 0]
    assert [value.consumers for value in embedded] == [(1, 3)]


def test_uses_rng_is_false_only_without_random_numbers() -> None:
    for name, names, expected in (
        ("mlp_dropout", ("layers.1", "head"), [True, True, False]),
        ("tied", ("third",), [False, False]),
        ("unet", ("bottom",), [False, True]),
    ):
        case = next(case for case in cases() if case.name == name)
        model = case.build().eval()
        assert [stage.uses_rng for stage in cut(case, model, names).stages] == expected
        assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("name", ["gpt_dropout", "export", "mlp_dropout"])
def test_train_and_eval_after_partitioning(name: str) -> None:
    case = next(case for case in cases() if case.name == name)
    torch.manual_seed(0)
    model = case.build()
    parts = cut(case, model, case.splits[0])
    args, kwargs, _ = case.batch(4)
    for training in (False, True):
        model.train(training)
        for stage in parts.stages:
            stage.module.train(training)
        torch.manual_seed(3)
        expected = model(*args, **kwargs)
        torch.manual_seed(3)
        assert_same(expected, parts.run(*args, **kwargs))


class ModeBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.training:
            x = x + torch.rand_like(x)
        return self.second(x)  # type: ignore[no-any-return]


def test_a_forward_that_branches_on_training_runs_in_its_mode_only() -> None:
    model = ModeBranch()
    x = torch.randn(3, 4)
    parts = partition(model, (x,), None, split_at("second"))
    parts.run(x)
    for stage in parts.stages:
        stage.module.eval()
    with pytest.raises(RuntimeError, match=r"stage 0 was traced in train\(\) and is now in eval\(\)"):
        parts.run(x)


class InPlace(nn.Module):
    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.first, self.second, self.third, self.keep = nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), keep

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        z = self.third(self.second(y))
        return z + y if self.keep else z  # type: ignore[no-any-return]


def test_a_change_in_place_of_a_received_value() -> None:
    x = torch.randn(3, 4)
    model = InPlace(keep=False)
    parts = partition(model, (x,), None, split_at("second"))
    leaf = parts.stages[0](x)[0].detach().requires_grad_()
    before = leaf.detach().clone()
    assert torch.equal(parts.stages[1](leaf)[0], model(x))
    assert torch.equal(leaf, before)
    partition(InPlace(keep=True), (x,), None, split_at("second"))
    with pytest.raises(
        ValueError, match="stage 1 changes first .* in place, and stage 2 reads first in the same memory"
    ):
        partition(InPlace(keep=True), (x,), None, split_at("second", "third"))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.norm(x))) + self.norm.running_mean  # type: ignore[no-any-return]


def test_a_changing_buffer_in_two_stages_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"buffer 'norm.running_mean' is changed in stage 0 and read in stages \[0, 1\]"
    ):
        partition(Counting(), (torch.randn(3, 4),), None, split_at("second"))


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
    with pytest.raises(ValueError, match=r"makes 2 stages, but there are 3 meshes"):
        partition(model, (x,), None, split_at("layers.1"), num_stages=3)
    with pytest.raises(ValueError, match="makes 2 stages, but there are 3 meshes"):
        partition([nn.Linear(6, 6), nn.Linear(6, 6)], (x,), num_stages=3)
    with pytest.raises(ValueError, match="split must be None where the model is a list"):
        partition([nn.Linear(6, 6)], (x,), None, split_at("0"))
    with pytest.raises(ValueError, match="split must be split_at"):
        partition(model, (x,), None, "half")


def test_an_untraceable_model_says_where() -> None:
    with pytest.raises(
        ValueError,
        match=r"torch.fx cannot trace the model \(Untraceable\) at .*small.py:\d+ in forward.*torch.export cannot",
    ):
        partition(small.Untraceable(), (torch.randn(3, 4),), None, split_at("second"))


def test_a_failing_node_says_where() -> None:
    with pytest.raises(
        ValueError,
        match=r"stage 0, node layers_0 \(call_module layers.0\) at .*small.py:\d+ in forward.*same reduction",
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
        ValueError, match=r"argument .*scale.* is a constant of the traced model: the example had 0.5, got 2.0"
    ):
        parts.bind(args, {"scale": 2.0})
    with pytest.raises(
        ValueError,
        match=r"argument args\[0\]\[1\] has shape \(5, 3\), the example had \(3, 4\) \(dim 0, the batch, may differ\)",
    ):
        parts.bind(((args[0][0], torch.randn(5, 3)),), kwargs)
    with pytest.raises(ValueError, match=r"args\[0\]\[0\] has dtype torch.float64, the example had torch.float32"):
        parts.bind(((args[0][0].double(), args[0][1]),), kwargs)
    with pytest.raises(ValueError, match="the arguments have the structure"):
        parts.bind((args[0][0],), kwargs)
    assert set(parts.bind(args, kwargs, stage=0)) == {"pair_0"}


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

    def exchange(stage: int, signature: StageSignature | None) -> StageSignature:
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


def test_one_stage() -> None:
    case = next(case for case in cases() if case.name == "bert")
    model = case.build()
    args, kwargs, _ = case.batch(3)
    parts = partition(model, args, kwargs)
    assert parts.num_stages == 1
    assert_same(parts.run(*args, **kwargs), model(*args, **kwargs))


def test_balance_is_optimal_and_keeps_the_memory_limit() -> None:
    seconds = [5.0, 1.0, 1.0, 1.0, 4.0, 2.0]
    units = [UnitCost(str(index), value, 10, 1) for index, value in enumerate(seconds)]
    assert balance(units, 3, None, 1) == [1, 4]
    assert balance(units, 3, 90, 1) == [2, 4]
    with pytest.raises(ValueError, match="no split into 3 stages keeps memory_limit_bytes=80"):
        balance(units, 3, 80, 1)
    with pytest.raises(ValueError, match="fewer than 7 stages"):
        balance(units, 7, None, 1)


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


def test_the_graph_of_an_exported_model_may_hold_for_one_batch_size() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] > 2:
                x = self.first(x)
            return self.second(self.first(x).view(3, 4))  # type: ignore[no-any-return]

    parts = partition(Fixed(), (torch.randn(3, 4),), None, split_at("second"))
    assert parts.fixed_batch
    with pytest.raises(ValueError, match=r"args\[0\] has shape \(4, 4\), the example had \(3, 4\)"):
        parts.run(torch.randn(4, 4))
    with pytest.raises(ValueError, match="exactly 3 samples, got 4"):
        parts.values["x"].shape_for(4)


MODES = [
    pytest.param(shards, first, id=f"{shards}-{'shards' if first else 'microbatches'}-first")
    for shards in (1, 2)
    for first in (False, True)
]


@pytest.mark.parametrize(("shards", "first"), MODES)
@pytest.mark.parametrize("name", ["mlp", "gpt", "bert", "unet", "lstm", "tied"])
def test_the_serial_step_is_the_mean_over_the_batch(name: str, shards: int, first: bool) -> None:
    case = next(case for case in cases() if case.name == name)
    torch.manual_seed(0)
    model = case.build()
    expected = copy.deepcopy(model)
    args, kwargs, target = case.batch(7)
    loss = case.loss(expected(*args, **kwargs), target)
    loss.backward()  # type: ignore[no-untyped-call]
    specs = dict(case.specs)
    result = serial_step(
        model,
        args,
        kwargs,
        target=target,
        loss_fn=case.loss,
        num_microbatches=3,
        num_data_shards=shards,
        shard_first=first,
        partition=cut(case, model, case.splits[0]),
        return_outputs=not (first and shards > 1),
        **specs,
    )
    torch.testing.assert_close(result.loss, loss.detach())
    for name_, gradient in gradients(expected).items():
        torch.testing.assert_close(gradients(model)[name_], gradient)
    assert len(result.losses) == 3
    if result.output is not None:
        torch.testing.assert_close(result.output, expected(*args, **kwargs))


def test_the_serial_step_seeds_dropout_and_accumulates() -> None:
    torch.manual_seed(0)
    model = small.MLP(dropout=0.5)
    x, y = torch.randn(6, 6), torch.randn(6, 3)
    state = torch.random.get_rng_state()
    first = serial_step(model, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=2, seed=5, step=1)
    once = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    second = serial_step(model, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=2, seed=5, step=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert_same(first.losses, second.losses)
    torch.testing.assert_close(
        [parameter.grad for parameter in model.parameters()], [2 * gradient for gradient in once]
    )
    other = serial_step(model, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=2, seed=5, step=2, backward=False)
    assert not torch.equal(other.loss, first.loss)


def test_buffers_end_as_data_shard_0_leaves_them() -> None:
    torch.manual_seed(0)
    model = vision.ConvNet()
    alone = copy.deepcopy(model)
    x, y = torch.randn(8, 2, 8, 8), torch.randn(8, 4)
    serial_step(model, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=2, num_data_shards=2)
    for half in (x[:2], x[4:6]):
        alone(half)
    assert_same(dict(model.named_buffers()), dict(alone.named_buffers()))
