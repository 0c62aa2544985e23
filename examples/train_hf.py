"""Trains a Llama of Hugging Face's transformers, as it comes, on two pipeline stages of different shape.

Run it with at least 2 processes: ``torchrun --nproc-per-node 3 examples/train_hf.py``. It needs transformers. The
model is tiny and random; the text, sums of small numbers, is made here. Sums have different lengths, so each batch is
padded to its longest line, and no two batches need be equally long. The first stage has all ranks but the last, as data
shards.
"""

import argparse
import copy
import random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from training import assert_as_serial, draw_pictures, progress, training_parser
from transformers import LlamaConfig, LlamaForCausalLM

import torch_xmesh as xm
from torch_xmesh.testing import serial_step

ALPHABET = "\n0123456789+="
PAD, BEGIN, END = 13, 14, 15


def make_model(width: int, depth: int) -> nn.Module:
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=depth,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=PAD,
        bos_token_id=BEGIN,
        eos_token_id=END,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def make_lines(count: int) -> list[list[int]]:
    """Lines such as "7+125=132", as token numbers."""
    dice = random.Random(0)
    pairs = [(dice.randrange(200), dice.randrange(200)) for _ in range(count)]
    return [[BEGIN, *(ALPHABET.index(letter) for letter in f"{a}+{b}={a + b}\n"), END] for a, b in pairs]


def collate(lines: list[list[int]]) -> dict[str, Any]:
    """A batch as data collators make it: padded to the longest line, with labels of -100 where there is padding."""
    longest = max(map(len, lines))
    tokens = torch.tensor([line + [PAD] * (longest - len(line)) for line in lines])
    mask = (tokens != PAD).long()
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def train(options: argparse.Namespace) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = make_model(options.width, options.depth)
    if options.checkpointing:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    reference = copy.deepcopy(model)
    lines = make_lines(4000)
    engine = xm.PipelineEngine(
        model,
        example_kwargs=collate(lines[: options.batch // options.microbatches]),
        meshes=[xm.Mesh(list(range(world - 1))), xm.Mesh([world - 1])],
        split=xm.split_at(f"model.layers.{options.depth // 2}"),
        num_microbatches=options.microbatches,
        loss_fn=lambda output: output.loss,
    )
    if rank == 0:
        print(engine.partition)
    optimizer = torch.optim.AdamW(engine.parameters(), 3e-3)
    other = torch.optim.AdamW(reference.parameters(), 3e-3)
    losses: list[float] = []
    for step in range(options.steps):
        batch = collate(random.Random(step).sample(lines, options.batch))
        optimizer.zero_grad()
        engine.step(**batch, return_outputs=False)
        if step < options.check_steps:
            other.zero_grad()
            serial = serial_step(
                reference, (), batch, loss_fn=lambda output: output.loss, num_microbatches=options.microbatches
            )
            assert_as_serial(engine, reference, serial)
            other.step()
        else:
            engine.clip_grad_norm_(1.0)
        optimizer.step()
        losses.append(engine.last_loss() or 0.0)
        if rank == 0:
            progress(step, options.steps, losses[-1])
    draw_pictures(engine, losses, options)
    engine.close()
    if rank == 0:
        print(f"the first {options.check_steps} steps equal one process; loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    assert losses[-1] < losses[0], f"the loss did not fall: {losses[0]} -> {losses[-1]}"


def main() -> None:
    parser = training_parser(__doc__, batch=32)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    options = parser.parse_args()
    dist.init_process_group("xmesh")
    if dist.get_world_size() < 2:
        raise SystemExit("expected at least 2 processes: torchrun --nproc-per-node 3 examples/train_hf.py")
    train(options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
