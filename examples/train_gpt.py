"""Trains a small GPT on two pipeline stages of different shape, and checks it against one process.

Run it with at least 2 processes: ``torchrun --nproc-per-node 3 examples/train_gpt.py --timeline timeline.png``.
The first stage has all ranks but the last, as data shards; the last rank has the second stage. With ``--device cuda``
stages are on GPUs: each rank has one, or shares it where there are fewer. The text, sums of small numbers, is made
here.
"""

import argparse
import copy
import os
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from training import assert_as_serial, draw_pictures, progress, training_parser

import torch_xmesh as xm
from torch_xmesh.testing import serial_step

ALPHABET = "0123456789+=\n"
CONTEXT = 32


class Attention(nn.Module):
    """Causal self-attention; [batch, time, width] to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return result


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, 4)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        result: torch.Tensor = x + self.feed(self.norm2(x))
        return result


class GPT(nn.Module):
    """Tokens [batch, CONTEXT] to logits; the head is the embedding, which ties the first stage to the last."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(len(ALPHABET), width)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(ALPHABET), bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def make_text(num_lines: int) -> torch.Tensor:
    """Lines such as "17+25=42", as token numbers."""
    dice = random.Random(0)
    pairs = [(dice.randrange(50), dice.randrange(50)) for _ in range(num_lines)]
    text = "".join(f"{a}+{b}={a + b}\n" for a, b in pairs)
    return torch.tensor([ALPHABET.index(letter) for letter in text])


def draw_batch(text: torch.Tensor, size: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The same batch on every rank: windows of the text, and the same one letter later."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(0, len(text) - CONTEXT - 1, (size,), generator=generator)
    windows = torch.stack([text[start : start + CONTEXT + 1] for start in starts])
    return windows[:, :-1], windows[:, 1:]


def check_against_serial(
    engine: xm.PipelineEngine, reference: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], microbatches: int
) -> None:
    """Loss and every gradient of the step just made, against one process."""
    serial = serial_step(reference, batch[:1], target=batch[1], loss_fn=loss_fn, num_microbatches=microbatches)
    assert_as_serial(engine, reference, serial)


def own_device(kind: str) -> torch.device:
    """This rank's, made the current one; torchrun says how many-th rank of its machine it is."""
    if kind != "cpu":
        if not torch.accelerator.is_available():
            raise SystemExit(f"--device {kind}: there is no such device here")
        torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", 0)) % torch.accelerator.device_count())
    return torch.device(kind)


def train(options: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    meshes = [xm.Mesh(list(range(world - 1))), xm.Mesh([world - 1])]
    torch.manual_seed(0)
    device = own_device(options.device)
    model = GPT(options.width, options.depth).to(device)
    reference = copy.deepcopy(model)
    example = torch.empty(options.batch // options.microbatches, CONTEXT, dtype=torch.int64)
    engine = xm.PipelineEngine(
        model,
        (example,),
        meshes=meshes,
        split=xm.split_at(f"blocks.{options.depth // 2}"),
        num_microbatches=options.microbatches,
        loss_fn=loss_fn,
    )
    if rank == 0:
        print(f"{engine.partition}\n{engine.schedule}")
    optimizer = torch.optim.AdamW(engine.parameters(), 3e-3)
    other = torch.optim.AdamW(reference.parameters(), 3e-3)
    text = make_text(4000)
    losses: list[float] = []
    for step in range(options.steps):
        tokens, target = draw_batch(text, options.batch, step)
        optimizer.zero_grad()
        engine.step(tokens, target=target, return_outputs=False)
        if step < options.check_steps:
            other.zero_grad()
            check_against_serial(engine, reference, (tokens.to(device), target.to(device)), options.microbatches)
            other.step()
        else:
            engine.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(engine.last_loss() or 0.0)
        if rank == 0:
            progress(step, options.steps, losses[-1])
    draw_pictures(engine, losses, options)
    summary = engine.summary()
    engine.close()
    if rank == 0:
        print(summary)
        print(f"the first {options.check_steps} steps equal one process; loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < losses[0], f"the loss did not fall: {losses[0]} -> {losses[-1]}"


def main() -> None:
    parser = training_parser(__doc__, batch=32)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--device", default="cpu", help="cuda, for stages on GPUs (%(default)s)")
    options = parser.parse_args()
    dist.init_process_group("xmesh")
    if dist.get_world_size() < 2:
        raise SystemExit("expected at least 2 processes: torchrun --nproc-per-node 3 examples/train_gpt.py")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
