"""fully_shard over a stage's data axis: reduced once a step, to the gradients of one process, which is the oracle."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pipeline_cases import about, has_output
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import serial_step, spawn

OPTIONS: dict[str, Any] = {"loss_fn": F.mse_loss, "num_microbatches": 4}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class Model(nn.Module):
    """Two blocks and a plain layer for each of two stages; the last weight is the first one's."""

    def __init__(self, seed: int, is_tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 6)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.last = nn.Linear(6, 6)
        if is_tied:
            self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(self.first(x)))  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True)
class Layout:
    """Meshes of two stages, what each one's parameters are sharded over, and how."""

    meshes: tuple[Any, ...]
    axes: tuple[Any, ...]
    reshard: bool | None = None
    is_root: bool = False
    is_tied: bool = False
    schedule: str = "eager_1f1b"

    @property
    def shards(self) -> int:
        return xm.Mesh(self.meshes[0]).shape[0] if not isinstance(self.axes[0], tuple) else 4


LINE = Layout(([0, 1], [2, 3]), (0, 0))
HYBRID = Layout(([[0, 1], [2, 3]], [4, 5, 6, 7]), ((0, 1), 0))


def own_mesh(layout: Layout) -> DeviceMesh:
    """This rank's stage's mesh, with process groups; every rank makes all."""
    mine = None
    for ranks in layout.meshes:
        grid = torch.tensor(ranks)
        names = ("replicate", "shard") if grid.dim() == 2 else ("shard",)
        mesh = DeviceMesh("cpu", grid, mesh_dim_names=names)
        if dist.get_rank() in xm.Mesh(ranks).ranks:
            mine = mesh
    assert mine is not None
    return mine


def make(layout: Layout, model: nn.Module, mesh: DeviceMesh, **options: Any) -> xm.PipelineEngine:
    def parallelize(stage: int, module: nn.Module, _: Any) -> nn.Module:
        for block in module.modules():
            if isinstance(block, Block) and mesh.get_coordinate() is not None:
                fully_shard(block, mesh=mesh, reshard_after_forward=layout.reshard)
        if layout.is_root:
            fully_shard(module, mesh=mesh)
        return module

    return xm.PipelineEngine(
        model,
        (torch.empty(4, 6),),
        meshes=[xm.Mesh(mesh) for mesh in layout.meshes],
        split=xm.split_at("blocks.2"),
        data_axis=list(layout.axes),
        parallelize=parallelize,
        schedule=layout.schedule,
        **{**OPTIONS, **options},
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(100 + step)
    return torch.randn(16, 6), torch.randn(16, 6)


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor().detach() if isinstance(tensor, DTensor) else tensor.detach()


def check(engine: xm.PipelineEngine, reference: nn.Module, of: str, where: str) -> None:
    expected = dict(reference.named_parameters(remove_duplicate=False))
    assert list(engine.parameters()), where
    for name, parameter in engine.named_parameters():
        mine, theirs = (one.grad if of == "gradient" else one for one in (parameter, expected[name]))
        assert mine is not None
        assert theirs is not None
        torch.testing.assert_close(full(mine), theirs.detach(), rtol=2e-5, atol=2e-6, msg=about(f"{where}: {name}"))


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often FSDP2 gathers and reduces."""
    counts = {"gathered": 0, "reduced": 0}
    newest = {"all_gather_single": "gathered", "reduce_scatter_single": "reduced"}
    before = {"all_gather_into_tensor": "gathered", "reduce_scatter_tensor": "reduced"}

    def counting(name: str, what: str) -> Any:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[what] += 1
            return real(*args, **kwargs)

        return call

    names = newest if hasattr(dist, "all_gather_single") else before  # as this version of torch calls them
    with mock.patch.multiple(dist, **{name: counting(name, what) for name, what in names.items()}):
        yield counts


def train(rank: int, world_size: int, layout: Layout) -> dict[str, int]:
    """Steps, one of them in two parts, with an evaluation between: gradients, norm and parameters."""
    engine = make(layout, Model(rank, layout.is_tied), own_mesh(layout))
    reference = Model(0, layout.is_tied)
    second = Model(xm.Mesh(layout.meshes[1]).ranks[0], layout.is_tied)
    for name in ("blocks.2", "blocks.3", "last"):
        source = second.get_submodule(name).state_dict()
        if layout.is_tied and name == "last":
            source["weight"] = reference.first.weight.detach()
        reference.get_submodule(name).load_state_dict(source)
    mine, theirs = (torch.optim.Adam(one.parameters(), 1e-2, eps=1e-3) for one in (engine, reference))
    with counted() as counts:
        for step in range(3):
            mine.zero_grad()
            theirs.zero_grad()
            x, y = batch(step)
            parts = [(x, y)] if step != 1 else [(x, y), batch(50)]
            for part, (x, y) in enumerate(parts):
                if part < len(parts) - 1:
                    with engine.no_sync():
                        engine.step(x, target=y)
                else:
                    engine.step(x, target=y)
                result = serial_step(reference, (x,), target=y, num_data_shards=layout.shards, **OPTIONS)
                assert engine.last_loss() == pytest.approx(float(result.loss), rel=1e-5)
            check(engine, reference, "gradient", f"step {step}")
            norm = engine.clip_grad_norm_(0.5)
            torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5))
            mine.step()
            theirs.step()
            output = engine.evaluate(x)  # the parameters as the optimizer left them
            assert (output is not None) == has_output(engine)
            if output is not None:
                torch.testing.assert_close(output, reference(x), rtol=2e-5, atol=2e-6)
    check(engine, reference, "parameter", "end")
    if layout.schedule != "eager_1f1b":  # stage 0 has no input gradients; all of its backward is W
        assert (
            "stage 1: I is the whole backward and W nothing, since a hook of torch.distributed.fsdp" in engine.summary()
        )
    counts["units"] = sum(isinstance(m, FSDPModule) for k in engine.stages for m in engine.stage_module(k).modules())
    engine.close()
    return counts


LAYOUTS = {
    "gathered in a step": dataclasses.replace(LINE, reshard=False),
    "resharded": dataclasses.replace(LINE, reshard=True),
    "default": LINE,
    "root, tied": dataclasses.replace(LINE, is_root=True, is_tied=True),
    "split": dataclasses.replace(LINE, schedule="zb_h1"),
    "split, root": dataclasses.replace(LINE, reshard=True, is_root=True, schedule="eager_split"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_one_process(name: str) -> None:
    """Three reductions of each module in three steps; one gathering a run, or one a forward and one a backward."""
    for counts in spawn(train, 4, LAYOUTS[name], timeout=60):
        assert counts["reduced"] == 3 * counts["units"]
        runs, microbatches = 7, 4
        if name == "gathered in a step":
            assert counts["gathered"] == runs * counts["units"]
        elif name == "resharded":
            assert counts["gathered"] == (2 * 4 + 3) * microbatches * counts["units"]


def test_hybrid_shards_on_a_mesh_of_two_axes() -> None:
    for counts in spawn(train, 8, HYBRID, timeout=90):
        assert counts["reduced"] == 3 * counts["units"]


def tensor_parallel(seed: int, inner: DeviceMesh) -> tuple[xm.PipelineEngine, torch.optim.Optimizer]:
    """The first stage is sharded over both axes of its mesh, the second one is on one rank."""

    def parallelize(stage: int, module: nn.Module, _: Any) -> nn.Module:
        for block in [one for one in module.modules() if isinstance(one, Block)] if stage == 0 else []:
            parallelize_module(block, inner["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            fully_shard(block, mesh=inner["dp"], reshard_after_forward=False)
        return module

    engine = xm.PipelineEngine(
        Model(seed),
        (torch.empty(4, 6),),
        meshes=[xm.Mesh([[0, 1], [2, 3]]), xm.Mesh([4])],
        split=xm.split_at("blocks.2"),
        data_axis=[0, None],
        parallelize=parallelize,
        **OPTIONS,
    )
    return engine, torch.optim.Adam(engine.parameters(), 1e-2, eps=1e-3)


def plain(seed: int, _: DeviceMesh) -> tuple[xm.PipelineEngine, torch.optim.Optimizer]:
    meshes = [xm.Mesh([0]), xm.Mesh([1, 2]), xm.Mesh([3, 4])]
    split = xm.split_at("blocks.1", "last")
    engine = xm.PipelineEngine(Model(seed), (torch.empty(4, 6),), meshes=meshes, split=split, **OPTIONS)
    return engine, torch.optim.Adam(engine.parameters(), 1e-2, eps=1e-3)


def scaled_and_saved(rank: int, world_size: int, folder: str) -> None:
    """A scaler and Adam around tensor parallelism inside; the checkpoint goes on in plain stages, and comes back."""
    inner = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    reference = Model(0)
    reference.load_state_dict(Model(4).state_dict() | {k: v for k, v in reference.state_dict().items() if _is_first(k)})
    theirs = torch.optim.Adam(reference.parameters(), 1e-2, eps=1e-3)
    for turn, kind in enumerate((tensor_parallel, plain, tensor_parallel)):
        engine, mine = kind(rank, inner)
        if turn:
            state = engine.state_dict(mine)
            dcp.load(state, checkpoint_id=f"{folder}/{turn - 1}")
            engine.load_state_dict(state, mine)
        scaler = engine.scaler(torch.amp.GradScaler("cpu", init_scale=64.0))
        for step in range(2):
            mine.zero_grad()
            theirs.zero_grad()
            x, y = batch(2 * turn + step)
            engine.step(x, target=y)
            serial_step(reference, (x,), target=y, **OPTIONS)
            scaler.unscale_(mine)
            check(engine, reference, "gradient", f"turn {turn}, step {step}")
            norm = engine.clip_grad_norm_(0.5)
            torch.testing.assert_close(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5))
            scaler.step(mine)
            scaler.update()
            theirs.step()
        check(engine, reference, "parameter", f"turn {turn}")
        dcp.save(engine.state_dict(mine), checkpoint_id=f"{folder}/{turn}")
        engine.close()


def _is_first(name: str) -> bool:
    return name.startswith(("first", "blocks.0", "blocks.1"))


def test_checkpoints_of_sharded_stages_load_into_others(tmp_path: Path) -> None:
    spawn(scaled_and_saved, 5, str(tmp_path), timeout=60)


def mistakes(rank: int, world_size: int) -> list[str]:
    found = []
    layout = Layout(([[0, 1], [2, 3]], [4]), ((0, 1), None))
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard"))
    for inner, axes, text in (
        (mesh["shard"] if rank < 4 else mesh, layout.axes, "are a part of its data axis, ranks"),
        (mesh, ((0, 0), None), "names an axis of stage 0's mesh twice"),
        (mesh, ((0, True), None), "data_axis of stage 0 is an axis's name"),
    ):
        with pytest.raises(ValueError) as caught:
            make(dataclasses.replace(layout, axes=axes), Model(0), inner)
        found.append(str(caught.value))
        assert text in found[-1], (rank, found[-1])
    return found


def test_mistakes() -> None:
    spawn(mistakes, 5, timeout=60)


def empty_shard(rank: int, world_size: int) -> str:
    engine = make(LINE, Model(0), own_mesh(LINE))
    with pytest.raises(ValueError) as caught:
        engine.step(torch.ones(6, 6), target=torch.ones(6, 6))
    engine.close()
    return str(caught.value)


def test_a_data_shard_without_samples_is_refused() -> None:
    for text in spawn(empty_shard, 4, timeout=60):
        assert "a microbatch of 1 samples leaves a data shard of stage" in text


class Branches(nn.Module):
    """Takes one of two ways by a value of its input: the model itself, which leaves a layer out, or a module that no
    stage cuts."""

    def __init__(self, is_inside: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.ways = Ways() if is_inside else None
        if not is_inside:
            self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.ways is not None:
            return self.last(self.ways(x))  # type: ignore[no-any-return]
        y = self.a(x)
        return self.last(y + self.b(x) if x[0, 0] > 0 else y)  # type: ignore[no-any-return]


class Ways(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) if x[0, 0] > 0 else self.b(x)  # type: ignore[no-any-return]


def branches(rank: int, world_size: int, is_inside: bool, each: bool) -> None:
    """Data shard 0 takes the first way, shard 1 the second. `each`: both ways gather parameters of their own."""
    model, reference = Branches(is_inside), Branches(is_inside)
    mesh = DeviceMesh("cpu", [0, 1])

    def parallelize(stage: int, module: nn.Module, _: Any) -> nn.Module:
        if stage == 0:
            for name, one in list(module.named_modules()):
                if each and name.rpartition(".")[2] in ("a", "b"):
                    fully_shard(one, mesh=mesh)
            if not each:
                fully_shard(module, mesh=mesh)
        return module

    engine = xm.PipelineEngine(
        model,
        (torch.ones(2, 6),),
        meshes=[xm.Mesh([0, 1]), xm.Mesh([2])],
        split=xm.split_at("last"),
        data_axis=[0, None],
        parallelize=parallelize,
        num_microbatches=2,
        loss_fn=F.mse_loss,
    )
    x = torch.randn(4, 6)
    x[:, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0])  # each microbatch has one of each sign, one per shard
    if each:
        with pytest.raises((ValueError, xm.StageError), match="was used by some data shards and not by others"):
            engine.step(x, target=x)
        return
    engine.step(x, target=x)
    for sample in x.split(1):  # type: ignore[no-untyped-call]
        (F.mse_loss(reference(sample), sample) / 4).backward()  # type: ignore[no-untyped-call]
    for name, parameter in engine.named_parameters():
        found = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        torch.testing.assert_close(found, reference.get_parameter(name).grad)
    engine.close()


@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("each", [False, True])
def test_data_shards_that_take_other_ways(is_inside: bool, each: bool) -> None:
    """Gradients of what only some use are summed as those of plain parameters are; where parameters are gathered on
    the way, the step is refused."""
    spawn(branches, 3, is_inside, each)
