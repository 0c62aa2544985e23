"""One model on three stages of different shape: 2 data shards, then 2 x 2, then 1; each step equals one process's.

Run it with 7 processes: ``torchrun --nproc-per-node 7 examples/heterogeneous_meshes.py``.
"""

import argparse
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from training import add_pictures, assert_as_serial, draw_pictures, progress

import torch_xmesh as xm
from torch_xmesh.testing import serial_step

MESHES = [xm.Mesh([0, 1]), xm.Mesh([[2, 3], [4, 5]]), xm.Mesh([6])]
MICROBATCHES = 6


class Residual(nn.Module):
    """x + MLP(x); [batch, width] to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.layers(x)
        return result


class Model(nn.Module):
    """Blocks with a long skip: the first block's output goes straight from the first stage to the last."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.second, self.third = Residual(width), Residual(width), Residual(width)
        self.head = nn.Linear(2 * width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.first(x)
        late = self.third(self.second(early))
        result: torch.Tensor = self.head(torch.cat([early, late], dim=1))
        return result


def train(options: argparse.Namespace) -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Model()
    reference = copy.deepcopy(model)
    engine = xm.PipelineEngine(
        model,
        (torch.empty(4, 16),),
        meshes=MESHES,
        split=xm.split_at("second", "third"),
        schedule="1f1b",
        num_microbatches=MICROBATCHES,
        loss_fn=F.mse_loss,
    )
    if rank == 0:
        print(f"{engine.partition}\n{engine.schedule}")
    optimizer = torch.optim.SGD(engine.parameters(), 0.05)
    other = torch.optim.SGD(reference.parameters(), 0.05)
    losses: list[float] = []
    for step in range(options.steps):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(24, 16, generator=generator)
        y = x.square().mean(dim=1, keepdim=True)
        optimizer.zero_grad()
        other.zero_grad()
        engine.step(x, target=y)
        serial = serial_step(reference, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=MICROBATCHES)
        assert_as_serial(engine, reference, serial)
        optimizer.step()
        other.step()
        losses.append(engine.last_loss() or 0.0)
        if rank == 0:
            progress(step, options.steps, losses[-1])
    draw_pictures(engine, losses, options)
    engine.close()
    if rank == 0:
        print(f"all {options.steps} steps equal one process; loss {losses[0]:.3f} -> {losses[-1]:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="all are compared with one process")
    add_pictures(parser)
    options = parser.parse_args()
    dist.init_process_group("xmesh")
    if (world := dist.get_world_size()) != 7:
        raise SystemExit(
            f"expected 7 processes, got {world}: torchrun --nproc-per-node 7 examples/heterogeneous_meshes.py"
        )
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
