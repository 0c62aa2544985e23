"""Trains a U-Transformer on two pipeline stages whose skip connections all cross the cut, and checks it against one
process.

Run it with 2 processes: ``torchrun --nproc-per-node 2 examples/train_unet_transformer.py``.
The encoder is the first stage, the decoder the second; the last rank has the decoder, all others are the encoder's data
shards. The task, telling discs from boxes pixel by pixel on a noisy ground, is drawn here.
"""

import argparse
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from training import assert_as_serial, draw_pictures, progress, training_parser

import torch_xmesh as xm
from torch_xmesh.testing import serial_step

CLASSES = ("ground", "disc", "box")


class Convolutions(nn.Module):
    """Two 3x3 convolutions; [batch, inputs, h, w] to [batch, outputs, h, w]."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(2, outputs), nn.GroupNorm(2, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))
        return result


class Encoder(nn.Module):
    """One level down: what the decoder will need at this size, and half the size for the level below."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.convolutions = Convolutions(inputs, outputs)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        skip = self.convolutions(x)
        return skip, F.max_pool2d(skip, 2)


class SelfAttention(nn.Module):
    """Every pixel looks at every pixel; [batch, width, h, w] to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pixels = self.norm(x.flatten(2).transpose(1, 2))
        seen, _ = self.attention(pixels, pixels, pixels, need_weights=False)
        result: torch.Tensor = x + seen.transpose(1, 2).reshape(x.shape)
        return result


class CrossAttention(nn.Module):
    """A skip weighted by what the level below looks for: queries from below, keys and values from the skip at the
    same, smaller, size; [batch, width, 2h, 2w] and [batch, 2 * width, h, w] to the skip's shape."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.query = nn.Conv2d(2 * width, width, 1)
        self.attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.gate = nn.Conv2d(width, width, 1)

    def forward(self, skip: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
        query = self.query(below)
        queries = query.flatten(2).transpose(1, 2)
        keys = F.avg_pool2d(skip, 2).flatten(2).transpose(1, 2)
        seen, _ = self.attention(queries, keys, keys, need_weights=False)
        gate = torch.sigmoid(self.gate(seen.transpose(1, 2).reshape(query.shape)))
        result: torch.Tensor = skip * F.interpolate(gate, scale_factor=2.0, mode="nearest")
        return result


class Decoder(nn.Module):
    """One level up: what comes from below at twice the size, beside the skip (gated where `heads` is not 0)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.up = nn.Conv2d(2 * width, width, 1)
        self.gate = CrossAttention(width, heads) if heads else None
        self.convolutions = Convolutions(2 * width, width)

    def forward(self, below: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        kept = skip if self.gate is None else self.gate(skip, below)
        grown = F.interpolate(self.up(below), scale_factor=2.0, mode="nearest")
        result: torch.Tensor = self.convolutions(torch.cat([kept, grown], dim=1))
        return result


class UTransformer(nn.Module):
    """A U-Net with attention after Petit et al. (2021): self-attention at the bottom, cross-attention gates on the
    skips; [batch, channels, h, w] to [batch, classes, h, w], h and w divisible by 2 ** levels.

    Args:
        width: channels of the first level, doubled by each; even.
        levels: skip connections, each from the encoder of its size to the decoder of the same size.
        heads: of the attentions.
        gated_levels: how many of the deepest skips are gated; attention over many pixels is slow.
    """

    def __init__(
        self,
        width: int = 8,
        levels: int = 2,
        *,
        channels: int = 1,
        classes: int = len(CLASSES),
        heads: int = 2,
        gated_levels: int = 1,
    ) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels + 1)]
        self.encoders = nn.ModuleList(
            Encoder(first, second) for first, second in zip([channels, *widths], widths[:-1], strict=False)
        )
        self.bottom = Convolutions(widths[-2], widths[-1])
        self.attention = SelfAttention(widths[-1], heads)
        self.decoders = nn.ModuleList(
            Decoder(widths[level], heads if level >= levels - gated_levels else 0) for level in reversed(range(levels))
        )
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        skips = []
        x = image
        for encoder in self.encoders:
            skip, x = encoder(x)
            skips.append(skip)
        x = self.attention(self.bottom(x))
        for decoder in self.decoders:
            x = decoder(x, skips.pop())
        result: torch.Tensor = self.head(x)
        return result


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, target)


def draw_batch(batch: int, size: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same pictures [batch, 1, size, size] and classes [batch, size, size] on every rank: a disc and a box each, as
    bright as one another."""
    generator = torch.Generator().manual_seed(step)
    places = torch.rand(batch, 6, generator=generator)
    ys, xs = torch.meshgrid(torch.arange(size) / size, torch.arange(size) / size, indexing="ij")
    target = torch.zeros(batch, size, size, dtype=torch.int64)
    for classes, (x, y, radius, u, v, side) in zip(target, places.tolist(), strict=True):
        classes[(xs - x) ** 2 + (ys - y) ** 2 < (0.1 + 0.15 * radius) ** 2] = 1
        classes[((xs - u).abs() < 0.08 + 0.14 * side) & ((ys - v).abs() < 0.08 + 0.14 * side)] = 2
    noise = torch.randn(batch, 1, size, size, generator=generator)
    return (target > 0).float().unsqueeze(1) + 0.2 * noise, target


def check_against_serial(
    engine: xm.PipelineEngine,
    reference: nn.Module,
    batch: tuple[torch.Tensor, torch.Tensor],
    microbatches: int,
    data_shards: int,
) -> None:
    """Loss and every gradient of the step just made, against one process."""
    serial = serial_step(
        reference,
        batch[:1],
        target=batch[1],
        loss_fn=loss_fn,
        num_microbatches=microbatches,
        num_data_shards=data_shards,
    )
    assert_as_serial(engine, reference, serial)


def make_engine(model: nn.Module, options: argparse.Namespace, world: int) -> xm.PipelineEngine:
    example = torch.empty(options.batch // options.microbatches, 1, options.size, options.size)
    return xm.PipelineEngine(
        model,
        (example,),
        meshes=[xm.Mesh(list(range(world - 1))), xm.Mesh([world - 1])],
        split=xm.split_at("decoders.0"),  # every skip is made before it and read behind it
        schedule="eager_1f1b",
        num_microbatches=options.microbatches,
        loss_fn=loss_fn,
    )


def train(options: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = UTransformer(options.width, options.levels)
    reference = copy.deepcopy(model)
    engine = make_engine(model, options, world)
    if rank == 0:
        print(f"{engine.partition}\n{engine.schedule}")
    optimizer = torch.optim.AdamW(engine.parameters(), 1e-2)
    other = torch.optim.AdamW(reference.parameters(), 1e-2)
    losses: list[float] = []
    for step in range(options.steps):
        images, target = draw_batch(options.batch, options.size, step)
        optimizer.zero_grad()
        engine.step(images, target=target, return_outputs=False)
        if step < options.check_steps:
            other.zero_grad()
            check_against_serial(engine, reference, (images, target), options.microbatches, world - 1)
            other.step()
        optimizer.step()
        losses.append(engine.last_loss() or 0.0)
        if rank == 0:
            progress(step, options.steps, losses[-1])
    draw_pictures(engine, losses, options)
    images, target = draw_batch(options.batch, options.size, options.steps)
    logits = engine.evaluate(images)
    if logits is not None:
        right = (logits.argmax(1) == target).float().mean()
        print(f"pixels of new pictures told right: {right:.1%} (ground alone: {(target == 0).float().mean():.1%})")
    engine.close()
    if rank == 0:
        print(f"the first {options.check_steps} steps equal one process; loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < losses[0], f"the loss did not fall: {losses[0]} -> {losses[-1]}"


def main() -> None:
    parser = training_parser(__doc__, batch=16)
    parser.add_argument("--size", type=int, default=32, help="pixels of a picture's side")
    parser.add_argument("--width", type=int, default=8)
    parser.add_argument("--levels", type=int, default=3, help="skip connections")
    options = parser.parse_args()
    dist.init_process_group("xmesh")
    if dist.get_world_size() < 2:
        raise SystemExit(
            "expected at least 2 processes: torchrun --nproc-per-node 2 examples/train_unet_transformer.py"
        )
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
