"""A run that ends and goes on from its checkpoint, in other stages: as if it had never ended."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from pipeline_cases import about, has_output
from torch import nn
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.pipeline.cut.partition import partition
from torch_xmesh.testing import serial_step, spawn


class Layers(nn.Module):
    """One layer is never called."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.third, self.idle = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))  # type: ignore[no-any-return]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(10 + step)
    return torch.randn(8, 4), torch.randn(8, 4)


def make_engine(seed: int, split: tuple[str, ...], meshes: tuple[list[int], ...]) -> xm.PipelineEngine:
    return xm.PipelineEngine(
        Layers(seed),
        (torch.empty(2, 4),),
        meshes=[xm.Mesh(mesh) for mesh in meshes],
        split=xm.split_at(*split),
        num_microbatches=4,
        loss_fn=F.mse_loss,
    )


def make_optimizer(named: Any, rate: float, decay: float) -> tuple[torch.optim.Optimizer, Any]:
    """Biases have a group of their own; StepLR lowers both groups' rates after every second step."""
    parameters = dict(named)
    biases = [parameter for name, parameter in parameters.items() if name.endswith("bias")]
    weights = [parameter for name, parameter in parameters.items() if name.endswith("weight")]
    groups = [{"params": weights, "weight_decay": decay}, {"params": biases, "lr": rate / 2}]
    optimizer = torch.optim.AdamW(groups, rate, betas=(decay, 0.99), eps=1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.1)


def save(rank: int, world_size: int, folder: str) -> None:
    engine = make_engine(0, ("third",), ([0, 1], [2]))
    optimizer, rate = make_optimizer(engine.named_parameters(), 0.1, 0.5)
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(step)
        engine.step(x, target=y)
        optimizer.step()
        rate.step()
    dcp.save(engine.state_dict(optimizer), checkpoint_id=folder)
    engine.close()


def resume(rank: int, world_size: int, folder: str) -> None:
    """The optimizer is made with other options; the checkpoint's count, and the next step is the serial run's."""
    engine = make_engine(1, ("second",), ([0], [1]))
    optimizer, rate = make_optimizer(engine.named_parameters(), 7.0, 0.25)
    state = engine.state_dict(optimizer)
    dcp.load(state, checkpoint_id=folder)
    engine.load_state_dict(state, optimizer)
    rate.last_epoch = 3
    reference = Layers(0)
    used = [(name, parameter) for name, parameter in reference.named_parameters() if "idle" not in name]
    other, other_rate = make_optimizer(used, 0.1, 0.5)
    for step in range(5):
        other.zero_grad()
        x, y = batch(step)
        serial_step(reference, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=4)
        other.step()
        other_rate.step()
        if step >= 3:
            optimizer.zero_grad()
            engine.step(x, target=y)
            optimizer.step()
            rate.step()
    for mine, theirs in zip(optimizer.param_groups, other.param_groups, strict=True):
        for key in theirs.keys() - {"params"}:
            assert mine[key] == pytest.approx(theirs[key]) if key == "lr" else mine[key] == theirs[key], key
    expected = dict(reference.named_parameters())
    for name, parameter in engine.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-4, atol=2e-5, msg=about(name))
    idle = {name: one.to_local() for name, one in engine.state_dict().items() if name.startswith("idle.")}
    assert set(idle) == ({"idle.weight", "idle.bias"} if rank == 0 else set())
    for name, value in idle.items():
        torch.testing.assert_close(value, expected[name].detach(), rtol=0, atol=0)
    engine.close()


def test_resume_in_other_stages(tmp_path: Path) -> None:
    spawn(save, 3, str(tmp_path / "saved"), timeout=60)
    spawn(resume, 2, str(tmp_path / "saved"), timeout=60)


def incomplete(rank: int, world_size: int) -> None:
    engine = make_engine(0, (), ([0],))
    optimizer, _ = make_optimizer(engine.named_parameters(), 0.1, 0.5)
    state = engine.state_dict(optimizer)
    for key, value, text in (
        ("first.weight/param_groups.lr", None, "the optimizer's state has no first.weight/param_groups.lr"),
        ("second.bias/param_groups.lr", 3.0, "first.bias and second.bias are in one group .* had lr 0.05 and 3.0"),
        ("head.bias/param_groups.lr", 3.0, "on rank 0, the optimizer's state has 'head.bias', which the model has not"),
        ("head.bias/exp_avg", 3.0, "on rank 0, the optimizer's state has 'head.bias', which the model has not"),
    ):
        changed = copy.copy(state["optimizer"])
        changed[key] = value
        if value is None:
            del changed[key]
        with pytest.raises(ValueError, match=text):
            engine.load_state_dict({**state, "optimizer": changed}, optimizer)
    for momentum, text in ((0.9, "has no first.weight/momentum_buffer"), (0.0, "has first.weight/exp_avg, but this")):
        with pytest.raises(ValueError, match=text):
            engine.load_state_dict(state, torch.optim.SGD(engine.parameters(), 0.1, momentum=momentum))
    with pytest.raises(ValueError, match="the state has no 'model'"):
        engine.load_state_dict(state["model"], optimizer)
    engine.close()


def test_options_that_do_not_fit() -> None:
    spawn(incomplete, 1, timeout=60)


def one_state_is_wrong(rank: int, world_size: int) -> None:
    """All ranks hear of it, none has copied anything, and the engine goes on."""
    engine = make_engine(0, ("second",), ([0], [1]))
    optimizer, _ = make_optimizer(engine.named_parameters(), 0.1, 0.5)
    state = engine.state_dict(optimizer)
    before = {name: parameter.detach().clone() for name, parameter in engine.named_parameters()}
    name = next(name for name, _ in engine.named_parameters())
    other = {key: value + 1 for key, value in state["model"].items()}
    moments = dict(state["optimizer"])
    moment = next(key for key in moments if key.startswith(f"{name}/") and getattr(moments[key], "ndim", 0) > 0)
    wrong = (
        ({**state, "model": {**other, name: torch.zeros(2, 3, 4)}}, rf"{name} has shape \(2, 3, 4\)"),
        ({**state, "model": other, "optimizer": {**moments, moment: torch.zeros(2, 3, 4)}}, r"has shape \(2, 3, 4\)"),
    )
    for one, text in wrong:
        with pytest.raises(ValueError, match=text if rank == 1 else "rank 1 refused load_state_dict"):
            engine.load_state_dict(one if rank == 1 else {**state, "model": other}, optimizer)
        assert all(torch.equal(parameter, before[name]) for name, parameter in engine.named_parameters())
    engine.load_state_dict(state, optimizer)
    engine.close()


def test_one_rank_has_a_wrong_state() -> None:
    spawn(one_state_is_wrong, 2, timeout=60)


class Noisy(nn.Module):
    """Dropout in every stage; the last layer is frozen for some steps."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.drop1, self.drop2, self.drop3 = (nn.Dropout(0.3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop1(torch.tanh(self.first(x)))
        x = self.drop2(torch.tanh(self.second(x)))
        return self.drop3(self.third(x))  # type: ignore[no-any-return]


PLACES: tuple[tuple[tuple[str, ...], tuple[list[int], ...]], ...] = (
    (("second", "third"), ([0], [1], [2, 3])),
    (("third",), ([2, 3], [0, 1])),
)


def noisy(seed: int, place: int, unfrozen: bool) -> tuple[xm.PipelineEngine, torch.optim.Optimizer]:
    split, meshes = PLACES[place]
    model = Noisy(seed)
    model.second.requires_grad_(unfrozen)
    engine = xm.PipelineEngine(
        model,
        (torch.empty(2, 4),),
        meshes=[xm.Mesh(mesh) for mesh in meshes],
        split=xm.split_at(*split),
        num_microbatches=4,
        loss_fn=F.mse_loss,
        seed=3,
    )
    return engine, torch.optim.Adam(engine.parameters(), 0.05)


def train(engine: xm.PipelineEngine, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        x, y = batch(step)
        engine.step(x, target=y)
        if step % 2:
            engine.evaluate(x, target=y)  # no training step: dropout goes on as if it had not been
        optimizer.step()


def whole(engine: xm.PipelineEngine) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in engine.named_parameters()}


def assert_same_state(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], where: str) -> None:
    assert found.keys() == expected.keys() != set(), where
    for key, value in found.items():
        assert torch.equal(value, expected[key]), (where, key)


def noisy_run(rank: int, world_size: int, folder: str) -> None:
    """Ten steps; saved before the first (with gradients there, which are no state) and after the third."""
    ranks = {r for mesh in PLACES[0][1] for r in mesh}
    engine, optimizer = noisy(0, 0, unfrozen=False)
    x, y = batch(99)
    engine.step(x, target=y)
    state = engine.state_dict(optimizer)
    assert not optimizer.state
    assert any(key.endswith("exp_avg") for key in state["optimizer"])
    assert all(p.grad is None or p.grad.any() for p in engine.parameters())
    dcp.save(state, checkpoint_id=f"{folder}/fresh")
    train(engine, optimizer, range(3))
    dcp.save(engine.state_dict(optimizer), checkpoint_id=f"{folder}/third")
    for parameter in engine.parameters():
        parameter.requires_grad_(True)
    train(engine, optimizer, range(3, 6))
    end = whole(engine)
    engine.close()
    for name, steps in (("fresh", range(6)), ("third", range(3, 6))):
        again, other = noisy(1, 0, unfrozen=True)
        again.step(x, target=y)  # leaves gradients: a fresh optimizer loads its state all the same
        state = again.state_dict(other)
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        again.load_state_dict(state, other)
        if name == "fresh":
            assert state["step"] == 1
            for key, parameter in again.named_parameters():
                parameter.requires_grad_("second" not in key)
            train(again, other, range(3))
            for parameter in again.parameters():
                parameter.requires_grad_(True)
            steps = range(3, 6)
        train(again, other, steps)
        assert_same_state(whole(again), end, name)
        again.close()
    assert rank in ranks


def noisy_elsewhere(rank: int, world_size: int, folder: str) -> None:
    """In other stages and meshes: the state is bitwise what was saved, and a step draws the masks of its number."""
    engine, optimizer = noisy(2, 1, unfrozen=True)
    state = engine.state_dict(optimizer)
    dcp.load(state, checkpoint_id=f"{folder}/third")
    engine.load_state_dict(state, optimizer)
    dcp.save(engine.state_dict(optimizer), checkpoint_id=f"{folder}/moved")
    reference = Noisy(5)
    saved = {name: torch.zeros_like(value) for name, value in reference.state_dict().items()}
    dcp.load({"model": saved}, checkpoint_id=f"{folder}/third", no_dist=True)
    reference.load_state_dict(saved)
    cut = partition(reference, (torch.empty(2, 4),), split=xm.split_at(*PLACES[1][0]))
    x, y = batch(7)
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "num_microbatches": 4, "num_data_shards": 2}
    expected = serial_step(reference, (x,), target=y, partition=cut, seed=3, step=4, **options)
    output = engine.step(x, target=y)
    assert state["step"] == 4
    assert (output is not None) == has_output(engine)
    if output is not None:
        torch.testing.assert_close(output, expected.output)
    gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in engine.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], msg=about(name))
    engine.close()


def noisy_back(rank: int, world_size: int, folder: str) -> None:
    """Back where it came from: nothing was lost on the way."""
    found = []
    for name in ("third", "moved"):
        engine, optimizer = noisy(6, 0, unfrozen=True)
        state = engine.state_dict(optimizer)
        dcp.load(state, checkpoint_id=f"{folder}/{name}")
        engine.load_state_dict(state, optimizer)
        train(engine, optimizer, range(3, 5))
        found.append(whole(engine))
        engine.close()
    assert_same_state(found[0], found[1], "moved")


def test_resume_is_bitwise_with_dropout(tmp_path: Path) -> None:
    spawn(noisy_run, 4, str(tmp_path), timeout=60)
    spawn(noisy_elsewhere, 4, str(tmp_path), timeout=60)
    spawn(noisy_back, 4, str(tmp_path), timeout=60)


class Forgetful(nn.Linear):
    """Its state dict has no weight."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[prefix + "weight"]


class Adapted(nn.Module):
    """A layer and an adapter, as a user's `parallelize` puts it in."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.adapter = layer, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.adapter(x)  # type: ignore[no-any-return]


def names(rank: int, world_size: int) -> None:
    calls = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        def run(*values: Any) -> Any:
            calls.append(1)
            return graph(*values)

        return run

    def adapt(stage: int, module: nn.Module, mesh: Any) -> nn.Module:
        name, layer = next(module.named_children())
        setattr(module, name, Adapted(layer))
        return module

    def make(model: Any, **options: Any) -> xm.PipelineEngine:
        meshes = [xm.Mesh([0]), xm.Mesh([1])]
        example, split = (torch.empty(2, 4),), xm.split_at("1")
        return xm.PipelineEngine(
            model, example, meshes=meshes, split=split, num_microbatches=2, loss_fn=F.mse_loss, **options
        )

    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    compiled = copy.deepcopy(plain)
    setattr(compiled, "0", torch.compile(compiled[0], backend=count))
    compiled[1].compile(backend=count)
    engine = make(compiled)
    assert not calls
    for step in range(1, 3):
        engine.step(torch.ones(4, 4), target=torch.ones(4, 4))
        assert rank == 1 or len(calls) == 2 * step  # rank 1: some torch compile no Linear in place
    state = engine.state_dict()
    assert set(state) == {f"{rank}.weight", f"{rank}.bias"} == {name for name, _ in engine.named_parameters()}
    changed = {name: value + 1 for name, value in compiled.state_dict().items()}
    engine.load_state_dict(changed)  # under the names of torch.compile's wrapper too
    for name, value in engine.state_dict().items():
        torch.testing.assert_close(value.to_local(), plain.state_dict()[name] + 1)
    before = engine.state_dict()
    for stranger, why in (({"1.wait": torch.ones(4, 4)}, r"'1\.wait'"), ({"a": 1, "b": 2}, "'a' and 1 more")):
        with pytest.raises(ValueError, match=f"on rank 0, the state dict has {why}, which the model has not"):
            engine.load_state_dict({**changed, **(stranger if rank == 0 else {})})
    for name, value in engine.state_dict().items():
        assert torch.equal(value.to_local(), before[name].to_local())
    engine.close()
    whole = copy.deepcopy(plain)
    whole.compile(backend=count)
    for model in (whole, torch.compile(copy.deepcopy(plain), backend=count)):
        with pytest.raises(ValueError, match="which is compiled: it would run uncompiled"):
            make(model)
    engine = make(copy.deepcopy(plain), parallelize=adapt, data_axis=None)
    assert {f"{rank}.adapter.weight", f"{rank}.layer.weight"} <= set(engine.state_dict())
    everything = {
        f"{k}.{layer}.{name}": 0 for k in (0, 1) for layer in ("adapter", "layer") for name in ("weight", "bias")
    }
    engine.load_state_dict({name: torch.ones(4, 4) if "weight" in name else torch.ones(4) for name in everything})
    engine.close()
    engine = make(nn.Sequential(Forgetful(4, 4), Forgetful(4, 4)))
    with pytest.raises(ValueError, match=f"parameter {rank}.weight is missing from the state_dict"):
        engine.state_dict()
    engine.close()


def test_no_parameter_is_lost() -> None:
    spawn(names, 2, timeout=60)
