"""Where dropout's random numbers come from: a seed per step, stage, microbatch and data shard."""

import contextlib
import hashlib
import struct
from collections.abc import Callable, Iterator

import torch

from torch_xmesh.generators import Drawn, Generators


def dropout_seed(*, seed: int, step: int, stage: int, microbatch: int, data_shard: int) -> int:
    """The seed of one stage's forward: 63 bits, equal on all ranks that pass the same five numbers.

    Ranks that share a data shard (tensor parallelism) draw the same numbers.
    """
    words = struct.pack("<5q", seed, step, stage, microbatch, data_shard)
    return int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 1


@contextlib.contextmanager
def dropout_rng(
    seed: int, device: torch.device | None = None, *, drawn: Drawn | None = None
) -> Iterator[Callable[[], Drawn]]:
    """Draw from `seed` inside, or go on from where another one has `drawn`, and leave the global generators (the CPU's
    and that of `device`) as they were. Inside, calling what it gives tells how far they have drawn."""
    generators = Generators(device)
    before = generators.states()
    if drawn is None:
        generators.seed(seed)
    else:
        generators.set_states(drawn)
    try:
        yield generators.states
    finally:
        generators.set_states(before)
