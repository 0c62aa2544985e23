"""What crosses stages, and what training changes: ties, skips, masks, modes, random numbers, changes in place."""

import copy

import pytest
import torch
from models import cases
from partition_cases import assert_same, cut
from torch import nn

from torch_xmesh.pipeline.cut.partition import partition, split_at


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


def test_a_forward_that_branches_on_training_takes_either_way() -> None:
    """Another node makes what crosses."""
    model = ModeBranch()
    x = torch.randn(3, 4)
    parts = partition(model, (x,), None, split_at("second"))
    for training in (True, False, True):
        model.train(training)
        for stage in parts.stages:
            stage.module.train(training)
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        assert torch.equal(parts.run(x), expected)


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
        ValueError, match="stage 1 changes first .* in place, and stage 2 reads second in the same memory"
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


class Helper:
    """No module, and yet it has a cache."""

    table: torch.Tensor | None = None

    def of(self, size: int) -> torch.Tensor:
        if self.table is None or len(self.table) < size:
            self.table = torch.arange(float(size))
        return self.table[:size]


class Caching(nn.Module):
    """As rotary embeddings do: what depends on the length alone is made at first use, and kept in many ways."""

    def __init__(self, is_sized: bool) -> None:
        super().__init__()
        self.is_sized = is_sized
        self.inner = nn.Linear(4, 4)
        self.by_size: dict[int, torch.Tensor] = {}
        self.seen: list[torch.Tensor] = []
        self.last: torch.Tensor | None = None
        self.helper = Helper()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_sized and x.size(1) not in self.by_size:
            self.by_size[x.size(1)] = torch.ones(x.size(1))
        if self.last is None:
            self.last = torch.ones(4)
            self.seen.append(self.last)
        y: torch.Tensor = self.inner(x) + self.seen[0] * self.last
        return y * self.by_size[x.size(1)] + self.helper.of(4) if self.is_sized else y


@pytest.mark.parametrize("point", ["1", "1.inner"])
def test_caches_are_left_as_they_were(point: str) -> None:
    """Modules that run on fakes, and one that is traced, in which a size is no key of a dict."""
    model = nn.Sequential(*(Caching(is_sized=point == "1") for _ in range(3)))
    x = torch.randn(2, 4)
    with torch.no_grad():
        expected = copy.deepcopy(model)(x)
    partition(model, (x,), None, split_at(point), num_stages=2)
    for module in model:
        assert isinstance(module, Caching)
        assert (module.by_size, module.seen, module.last, module.helper.table) == ({}, [], None, None)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)
