"""What an engine does besides steps, with stages on a device: as on cpu, to the last bit. Each function is called by
four ranks, with the kinds of device of two stages."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from device_pipelines import assert_same, on_cpu
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import torch_xmesh as xm

BOTH = (("emu", "emu"), ("cpu", "emu"), ("emu", "cpu"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
        self.drop = nn.Dropout(0.25)
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.drop(self.first(x)) + torch.arange(8, device=x.device) / 8)
        return y


def made(kinds: tuple[str, ...], *, mesh: Any = ([0, 1], [2, 3]), on_meta: bool = False, **options: Any) -> Any:
    """An engine of two stages of two data shards each; `kinds` by stage."""
    torch.manual_seed(3)
    with torch.device("cpu"):
        model = Net()
        model.drop.p = options.pop("dropout", 0.25)
    if on_meta:
        model = model.to("meta")
    else:
        model.first.to(kinds[0])
        model.second.to(kinds[1])
    usual: dict[str, Any] = {
        "meshes": [xm.Mesh(ranks, device_type=kind) for ranks, kind in zip(mesh, kinds, strict=True)],
        "split": xm.split_at("second"),
        "num_microbatches": 4,
        "loss_fn": F.mse_loss,
        "schedule": "zb_h1",
    }
    return xm.PipelineEngine(model, (torch.zeros(4, 6, device="cpu"),), **usual | options)


def batch(step: int, number: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(100 + step)
    with torch.device("cpu"):
        return torch.randn(number, 6), torch.randn(number, 3)


def gradients(engine: Any) -> Any:
    return on_cpu({name: parameter.grad for name, parameter in engine.named_parameters()})


def compared(body: Callable[[Any, tuple[str, ...]], Any], rtol: float = 0, **options: Any) -> None:
    """What `body` finds with each choice of devices is what it finds on cpu."""
    with made(("cpu", "cpu"), **options) as engine:
        want = on_cpu(body(engine, ("cpu", "cpu")))
    for kinds in BOTH:
        with made(kinds, **options) as engine:
            assert_same([want, on_cpu(body(engine, kinds))], f"{body.__name__} on {kinds}", rtol)


def _clipped(engine: Any, kinds: tuple[str, ...]) -> Any:
    found: list[Any] = []
    optimizer = torch.optim.AdamW(engine.parameters(), 1e-2, foreach=True)
    for step, norm_type in enumerate((2.0, float("inf"), 1.0, 0.0)):
        x, y = batch(step)
        optimizer.zero_grad()
        engine.step(x, target=y)
        norm = engine.clip_grad_norm_(0.05, norm_type)
        assert norm.device.type == kinds[engine.stages[0]]
        found += [engine.last_loss(), norm, gradients(engine)]
        optimizer.step()
    return found, dict(engine.named_parameters())


def clipping(rank: int, world_size: int) -> None:
    compared(_clipped)


def late_batches(rank: int, world_size: int) -> None:
    """A batch that the device has not made yet, for stages on cpu and on the device; evaluation waits for no loss."""
    import emu_device

    x, _ = batch(0)
    for kinds in (("cpu", "emu"), ("emu", "cpu")):
        with made(("cpu", "cpu"), dropout=0.0) as engine:
            engine.eval()
            want = engine.evaluate(x)
        with made(kinds, dropout=0.0) as engine:
            engine.eval()
            for _ in range(2):
                there = torch.zeros(16, 6, device="emu")
                torch.accelerator.synchronize()
                gate = emu_device.hold(max_ms=200)  # opens by itself
                there.copy_(x.to("emu", non_blocking=True))
                found = engine.evaluate(there)
                there.zero_()
                assert_same([on_cpu(want), on_cpu(found)], f"late batch on {kinds}")
                del gate


def one_rank_on_both(rank: int, world_size: int) -> None:
    """A scaler where one rank has a stage on each kind of device."""
    if rank > 1:
        return
    for pair in (("emu", "cpu"), ("cpu", "emu")):
        found = []
        for kinds in (("cpu", "cpu"), pair):
            with made(kinds, mesh=([0, 1], [0, 1]), schedule="1f1b") as engine:
                scaler = engine.scaler(torch.amp.GradScaler("emu", init_scale=1024.0, growth_interval=2))
                optimizer = torch.optim.SGD(engine.parameters(), 1e-2)
                seen = []
                for step in range(4):
                    x, y = batch(step)
                    if step == 2:
                        x[3] = float("inf")
                    optimizer.zero_grad()
                    engine.step(x, target=y)
                    scaler.step(optimizer)
                    scaler.update()
                    seen.append(on_cpu([scaler.get_scale(), dict(engine.named_parameters())]))
                found.append(seen)
        assert_same(found, f"scaled on {pair}")


def _scaled(engine: Any, kinds: tuple[str, ...]) -> Any:
    found: list[Any] = []
    kind = kinds[engine.stages[0]]
    scaler = engine.scaler(torch.amp.GradScaler(kind, init_scale=8.0, growth_interval=2))
    optimizer = torch.optim.SGD(engine.parameters(), 1e-2)
    for step in range(5):
        x, y = batch(step)
        if step == 2:
            x[3] = float("inf")  # one rank's gradients are not finite: no rank steps
        optimizer.zero_grad()
        engine.step(x, target=y)
        scaler.unscale_(optimizer)
        engine.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        found += [scaler.get_scale(), dict(engine.named_parameters())]
        found[-1] = on_cpu(found[-1])
    return found


def scaler(rank: int, world_size: int) -> None:
    compared(_scaled)


def _cast(engine: Any, kinds: tuple[str, ...]) -> Any:
    found: list[Any] = []
    for step in range(3):
        x, y = batch(step)
        engine.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("emu", dtype=torch.bfloat16):
            output = engine.step(x, target=y)
        assert output is None or output.dtype == torch.bfloat16
        found += [engine.last_loss(), output, gradients(engine)]
    return found


def autocast(rank: int, world_size: int) -> None:
    """The CPU multiplies bfloat16 in another order where a matrix lies otherwise in memory, so the last bit differs."""
    compared(_cast, rtol=2**-7)
    compared(_cast, rtol=2**-7, on_meta=True, init_fn=_set_all)


def _evaluated(engine: Any, kinds: tuple[str, ...]) -> Any:
    found: list[Any] = []
    x, y = batch(0)
    engine.step(x, target=y)
    engine.eval()
    for number in (16, 12, 5):
        x, y = batch(number, number)
        losses: list[torch.Tensor] = []
        output = engine.evaluate(x, target=y, losses=losses)
        found += [output, losses, engine.last_loss()]
    engine.train()
    with engine.no_sync():
        engine.step(*batch(1)[:1], target=batch(1)[1])
    engine.step(*batch(2)[:1], target=batch(2)[1])
    return found, gradients(engine), [dict(engine.stage_module(stage).named_buffers()) for stage in engine.stages]


def evaluating(rank: int, world_size: int) -> None:
    compared(_evaluated)


def _set_all(module: nn.Module) -> None:
    for number, parameter in enumerate(module.parameters(recurse=False)):
        numbers = torch.arange(parameter.numel(), device="cpu").view(parameter.shape)
        parameter.copy_(((numbers * (7 + number)) % 11 - 5) / 10)
    if isinstance(module, nn.BatchNorm1d):
        module.reset_running_stats()


def _trained(engine: Any, kinds: tuple[str, ...]) -> Any:
    optimizer = torch.optim.AdamW(engine.parameters(), 1e-2, foreach=True)
    for step in range(2):
        x, y = batch(step)
        optimizer.zero_grad()
        engine.step(x, target=y)
        optimizer.step()
    assert all(parameter.device.type == kinds[engine.stages[0]] for parameter in engine.parameters())
    return engine.last_loss(), dict(engine.named_parameters())


def on_meta(rank: int, world_size: int) -> None:
    """The mesh says where the stage is; the modules' own initial values are drawn there."""
    compared(_trained, on_meta=True, init_fn=_set_all)


def _resumed(engine: Any, kinds: tuple[str, ...]) -> Any:
    optimizer = torch.optim.AdamW(engine.parameters(), 1e-2, foreach=True)
    for step in range(2):
        optimizer.zero_grad()
        engine.step(*batch(step)[:1], target=batch(step)[1])
        optimizer.step()
    saved = engine.state_dict(optimizer)
    kept = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.clone(), saved)
    after = []
    for turn in range(2):
        if turn:
            engine.load_state_dict(kept, optimizer)
        optimizer.zero_grad()
        engine.step(*batch(7)[:1], target=batch(7)[1])
        optimizer.step()
        after.append(on_cpu([engine.last_loss(), dict(engine.named_parameters())]))
    assert_same(after, f"resumed on {kinds}")
    for name, tensor in saved["model"].items():
        assert tensor.to_local().device.type == kinds[engine.stages[0]], name
    return after


def resuming(rank: int, world_size: int) -> None:
    compared(_resumed)


def _lengths(engine: Any, kinds: tuple[str, ...]) -> Any:
    found = []
    for number in (16, 24, 32):
        engine.zero_grad()
        x, y = batch(number, number)
        found.append((engine.step(x.to(kinds[0]), target=y.to(kinds[1])), gradients(engine)))
    return found


def lengths(rank: int, world_size: int) -> None:
    compared(_lengths)


def chosen_schedule(rank: int, world_size: int) -> None:
    """Each action is measured with its device waited for."""
    for kinds in (("emu", "emu"), ("cpu", "emu")):
        with made(kinds, schedule="auto", num_microbatches="auto") as engine:
            for step in range(5):
                engine.step(*batch(step)[:1], target=batch(step)[1])
            assert f"{engine.schedule.name}: predicted" in engine.summary()


def mistakes(rank: int, world_size: int) -> None:
    """ValueErrors, on all ranks; a new engine on the same ranks works."""
    with torch.device("cpu"):
        mixed = Net()
    mixed.first[0].to("emu")
    ranks = ([0, 1], [2, 3])
    for model, kinds, text in (
        (mixed, (None, None), "stage 0 is on several devices: first.0.weight on emu:0, first.1.weight on cpu"),
        (Net().to("cpu"), ("emu", None), "stage 0's mesh is one of emu devices, its parameters are on cpu"),
        (Net().to("emu"), (None, "cpu"), "stage 1's mesh is one of cpu devices, its parameters are on emu"),
        (Net().to("emu:1"), (None, None), "is on emu:1, the current device is emu:0"),
        (
            Net().to("emu" if rank else "cpu"),
            (None, None),
            "stage 0 is on cpu on rank 0 and on emu on rank 1",
        ),
        (
            Net().to("meta"),
            ("emu" if rank else "cpu", None),
            "mesh of stage 0 is on cpu on rank 0 and on emu",
        ),
        (Net().to("meta"), ("cuda", None), "stage . is to be on a cuda device, and rank . has none"),
    ):
        meshes = [xm.Mesh(here, device_type=kind) for here, kind in zip(ranks, kinds, strict=True)]
        with pytest.raises(ValueError, match=text.replace("(", r"\(")):
            xm.PipelineEngine(
                model,
                (torch.zeros(4, 6, device="cpu"),),
                meshes=meshes,
                split=xm.split_at("second"),
                num_microbatches=2,
                loss_fn=F.mse_loss,
            )
    with made(("emu", "emu")) as engine:
        engine.step(*batch(0)[:1], target=batch(0)[1])


def dropout(rank: int, world_size: int) -> None:
    """The caller's generators go on as if nothing had been drawn."""
    with made(("emu", "emu")) as engine:
        torch.manual_seed(5)
        before = torch.get_rng_state()
        engine.step(*batch(0)[:1], target=batch(0)[1])
        torch.manual_seed(5)
        assert torch.equal(before, torch.get_rng_state())


class Sharded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x))
        return y


def fully_sharded(rank: int, world_size: int) -> None:
    """FSDP2's collectives are the inner backend's."""
    found = []
    for kind in ("cpu", "emu"):
        inner = xm.Options()
        inner.inner = {"emu": "emunccl"}
        groups = [dist.new_group(ranks, backend="cpu:xmesh,emu:xmesh", pg_options=inner) for ranks in ([0, 1], [2, 3])]
        mine = DeviceMesh.from_group(groups[rank // 2], kind, mesh=[0, 1] if rank < 2 else [2, 3])
        torch.manual_seed(3)
        with torch.device("cpu"):
            model = Sharded()
        engine = xm.PipelineEngine(
            model.to(kind),
            (torch.zeros(4, 6),),
            meshes=[xm.Mesh(ranks, device_type=kind) for ranks in ([0, 1], [2, 3])],
            split=xm.split_at("second"),
            num_microbatches=4,
            loss_fn=F.mse_loss,
            schedule="zb_h1",
            parallelize=lambda stage, module, mesh, mine=mine: fully_shard(module, mesh=mine),  # type: ignore[arg-type,misc]
        )
        optimizer = torch.optim.SGD(engine.parameters(), 1e-2)
        results = []
        for step in range(3):
            x, y = batch(step)
            optimizer.zero_grad()
            engine.step(x, target=y)
            norm = engine.clip_grad_norm_(0.1)
            local = {name: parameter.grad.to_local() for name, parameter in engine.named_parameters()}  # type: ignore[union-attr]
            results.append(on_cpu([engine.last_loss(), norm, local]))
            optimizer.step()
        found.append(results)
        engine.close()
    assert_same(found, "fully sharded")


class Held(nn.Module):
    """The identity. Once it is armed, its first call stops the device's stream behind it, and its last one lets it go
    on."""

    gate: Any = None
    calls = -1
    reached_ns = 0
    released_ns = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import emu_device

        y: torch.Tensor = x + 0
        if self.calls >= 0 and type(y) is torch.Tensor and y.device.type == "emu":
            type(self).calls += 1
            if self.calls == 1:
                type(self).gate = emu_device.hold()
                assert self.gate.wait_until_reached()
                type(self).reached_ns = time.monotonic_ns()
            if self.calls == 4:
                type(self).released_ns = time.monotonic_ns()
                self.gate.release()
        return y


def run_ahead(rank: int, world_size: int) -> None:
    """The host waits for no device between the microbatches' forwards; what is shown of them is when the device was at
    them."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), Held(), nn.Linear(8, 3))
    engine = xm.PipelineEngine(
        model.to("emu"),
        (torch.zeros(4, 6),),
        meshes=[xm.Mesh([0, 1], device_type="emu"), xm.Mesh([2, 3], device_type="emu")],
        split=xm.split_at("2"),
        num_microbatches=4,
        loss_fn=F.mse_loss,
        schedule="gpipe",
    )
    x, y = batch(0)
    engine.step(x, target=y)
    Held.calls = 0
    engine.step(x, target=y)
    if rank < 2:
        assert Held.calls == 4
        spans = {name: (begin, end) for kind, name, begin, end in engine._place.core.spans if kind == "compute"}
        assert len(spans) == 8
        # What the device's clock says is compared with itself: where it lies on the host's is known to a wake-up.
        assert spans["0F0"][1] - spans["0F0"][0] >= Held.released_ns - Held.reached_ns
        ordered = sorted(spans.values())
        assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(ordered))
        sent = [begin for is_send, _, _, _, begin, _ in engine._place.core.transfers if is_send]
        assert min(sent) >= Held.released_ns
    Held.calls = -1
    text = engine.summary()
    assert "waiting s" in text
    engine.close()


CASES = (
    run_ahead,
    fully_sharded,
    clipping,
    scaler,
    late_batches,
    one_rank_on_both,
    autocast,
    evaluating,
    on_meta,
    resuming,
    lengths,
    chosen_schedule,
    mistakes,
    dropout,
)
