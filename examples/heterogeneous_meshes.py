"""One model on three stages of different shape: 2 data shards, then 2 x 2, then 1; each step equals one process's.

Run it with 7 processes: ``torchrun --nproc-per-node 7 examples/heterogeneous_meshes.py``.
"""

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import serial_step

MESHES = [xm.Mesh([0, 1]), xm.Mesh([[2, 3], [4, 5]]), xm.Mesh([6])]
MICROBATCHES = 6
STEPS = 20


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


def main() -> None:
    dist.init_process_group("xmesh")
    rank, world = dist.get_rank(), dist.get_world_size()
    if world != 7:
        raise SystemExit(
            f"expected 7 processes, got {world}: torchrun --nproc-per-node 7 examples/heterogeneous_meshes.py"
        )
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
        print(engine.partition)
        print(engine.schedule)
    optimizer = torch.optim.SGD(engine.parameters(), 0.05)
    other = torch.optim.SGD(reference.parameters(), 0.05)
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(24, 16, generator=generator)
        y = x.square().mean(dim=1, keepdim=True)
        optimizer.zero_grad()
        other.zero_grad()
        engine.step(x, target=y)
        serial = serial_step(reference, (x,), target=y, loss_fn=F.mse_loss, num_microbatches=MICROBATCHES)
        expected = dict(reference.named_parameters())
        for name, parameter in engine.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-4, atol=1e-6)
        optimizer.step()
        other.step()
        if rank == 0:
            sys.stdout.write(
                f"\rstep {step + 1}/{STEPS}, loss {engine.last_loss():.4f}, in one process {float(serial.loss):.4f}"
            )
            sys.stdout.flush()
    if rank == 0:
        print("\nevery gradient of every step equals the run in one process")
    engine.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
