"""Pipelines of two stages on a device, beside the same on cpu.

boundary    a value that goes from stage to stage through host memory, beside a pipeline on cpu that moves as many
            bytes, with one copy to the host before and one to the device behind
action      what the engine itself needs of the calling thread for an action (CPU time of a step less that of the
            stages' own operators), beside the same on cpu
"""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

import torch_xmesh as xm
from parts.device.blocks import CONTROL, OURS, RIVAL, Block, Record, compared, over_ranks, records_of

_MICROBATCHES, _STEPS = 16, 10


class Passes(nn.Module):
    """What comes in, goes on; it is kept, to be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor:  # no stand-in
            self.seen = x
        return x.view_as(x)


def _engine(stages: Sequence[nn.Module], example: torch.Tensor, kind: str, num_microbatches: int) -> xm.PipelineEngine:
    return xm.PipelineEngine(
        [stage.to(kind) for stage in stages],
        (example,),
        meshes=[xm.Mesh([0], device_type=kind), xm.Mesh([1], device_type=kind)],
        num_microbatches=num_microbatches,
        loss_fn=lambda output, target: output.mean(),
        schedule="1f1b",
    )


def boundary(device: torch.device, num_bytes: int, *, runs: int, repeats: int) -> list[Record]:
    """Called by two ranks."""
    rank = dist.get_rank()
    whole = torch.arange(num_bytes // 4, dtype=torch.float32).reshape(-1, 1024)
    on_device, copied = whole.to(device), torch.empty_like(whole, device=device)
    engines, sinks = {}, {}
    for kind in ("cpu", device.type):
        stages = [Passes(), Passes()]
        engines[kind], sinks[kind] = _engine(stages, whole[:1], kind, 1), stages[rank]
    host = torch.empty(whole.shape, pin_memory=True)

    def rival() -> None:
        if rank == 0:
            host.copy_(on_device, non_blocking=True)
            torch.accelerator.synchronize()
        engines["cpu"].evaluate(host)
        if rank == 1:
            seen = sinks["cpu"].seen
            assert seen is not None
            copied.copy_(seen, non_blocking=True)
            torch.accelerator.synchronize()

    def ours() -> None:
        engines[device.type].evaluate(on_device)
        torch.accelerator.synchronize()

    wanted = whole if rank == 1 else None
    beside = Block(rival, lambda: copied if rank == 1 else None, wanted)
    blocks = {
        RIVAL: beside,
        OURS: Block(ours, lambda: sinks[device.type].seen if rank == 1 else None, wanted),
        CONTROL: beside,
    }
    found = compared("boundary", num_bytes, blocks, runs=runs, repeats=repeats)
    for engine in engines.values():
        engine.close()
    return found


def action(device: torch.device, *, runs: int) -> list[Record]:
    """Called by two ranks."""
    torch.manual_seed(0)
    x = torch.randn(2 * _MICROBATCHES, 8)
    made = {}
    for kind in ("cpu", device.type):
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
        made[kind] = _engine(layers, x[:2], kind, _MICROBATCHES), layers[dist.get_rank()]
    methods = {RIVAL: "cpu", OURS: device.type, CONTROL: "cpu"}
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    wrong = dict.fromkeys(methods, 0)
    losses = {}
    with torch.autograd.set_multithreading_enabled(False):  # else a device's backward is on another thread
        for turn in range(runs + 1):
            for name, kind in methods.items():
                engine, layer = made[kind]
                own = _operators(layer, x.to(kind))
                given = x.to(kind)
                torch.accelerator.synchronize()
                dist.barrier()
                begin = time.thread_time()
                for _ in range(_STEPS):
                    engine.step(given, target=given)
                took = (time.thread_time() - begin) / _STEPS
                losses[name] = engine.last_loss()
                num_actions = 2 * _MICROBATCHES
                if turn > 0:
                    seconds[name].append(float(over_ranks([max(took - own, 0.0) / num_actions]).max()))
                wrong[name] += losses[name] != losses[RIVAL]
    for engine, _ in made.values():
        engine.close()
    wrong = {name: int(over_ranks([count]).sum()) for name, count in wrong.items()}
    return records_of("action", 0, seconds, wrong, runs)


def _operators(layer: nn.Module, x: torch.Tensor) -> float:
    """CPU seconds of this thread for what a stage's operators do in a step."""
    begin = time.thread_time()
    for _ in range(_STEPS):
        for part in x.chunk(_MICROBATCHES):
            leaf = part.detach().requires_grad_()
            layer(leaf).mean().backward()
    return (time.thread_time() - begin) / _STEPS
