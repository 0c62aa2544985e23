"""Where dropout's random numbers come from: a seed per step, stage, microbatch and data shard."""

import contextlib
import hashlib
import struct
from collections.abc import Callable, Iterator

import torch


def dropout_seed(*, seed: int, step: int, stage: int, microbatch: int, data_shard: int) -> int:
    """The seed of one stage's forward: 63 bits, equal on all ranks that pass the same five numbers.

    Ranks that share a data shard (tensor parallelism) draw the same numbers.
    """
    words = struct.pack("<5q", seed, step, stage, microbatch, data_shard)
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1


@contextlib.contextmanager
def dropout_rng(
    seed: int, device: torch.device | None = None, *, drawn: torch.Tensor | None = None
) -> Iterator[Callable[[], torch.Tensor]]:
    """Draw from `seed` inside, or go on from where another one has `drawn`, and leave the global generators (CPU, and
    `device` if it is CUDA) as they were. Inside, calling what it gives tells how far the CPU's has drawn."""
    cuda = device if device is not None and device.type == "cuda" else None
    cpu_state = torch.random.get_rng_state()
    cuda_state = None if cuda is None else torch.cuda.get_rng_state(cuda)
    if drawn is None:
        torch.default_generator.manual_seed(seed)
    else:
        torch.random.set_rng_state(drawn)
    if cuda is not None:
        with torch.cuda.device(cuda):
            torch.cuda.manual_seed(seed)
    try:
        yield torch.random.get_rng_state
    finally:
        torch.random.set_rng_state(cpu_state)
        if cuda is not None and cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, cuda)
