"""Which samples of a batch each microbatch has, whatever form the batch comes in.

A plain batch is cut into microbatches of consecutive samples. A batch that comes sharded keeps its samples where they
are: each of its shards is cut into microbatches of its own, and a microbatch is what all shards have of it:

    4 microbatches of 16 samples, on two shards:  shard 0  | 0 1 | 2 3 | 4 5 | 6 7 |    microbatch 0: 0 1 8 9
                                                  shard 1  | 8 9 |10 11|12 13|14 15|    microbatch 1: 2 3 10 11, ...

All that belongs to the samples (other arguments, the target, the output) goes by the same order.
"""

import dataclasses
import functools

import torch

from torch_xmesh.pipeline.cut.microbatch import microbatch_sizes, shard_sizes


@dataclasses.dataclass(frozen=True)
class SampleOrder:
    """The samples of each microbatch.

    Attributes:
        sizes: samples per microbatch.
        num_shards: data shards in which the batch comes; 1 for plain tensors.
    """

    sizes: tuple[int, ...]
    num_shards: int

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def of(num_samples: int, num_microbatches: int, num_shards: int = 1) -> "SampleOrder":
        """Raises ValueError where microbatches or their shards would be uneven in a way that moves samples."""
        order = SampleOrder(tuple(microbatch_sizes(num_samples, num_microbatches)), num_shards)
        whole = shard_sizes(num_samples, num_shards)
        for shard, expected in enumerate(whole):
            parts = [shard_sizes(size, num_shards)[shard] for size in order.sizes]
            if sum(parts) != expected:
                raise ValueError(
                    f"a batch of {num_samples} samples on {num_shards} data shards has {expected} of them on shard "
                    f"{shard}, which microbatches of {list(order.sizes)} samples would cut into {parts}: pass a batch "
                    f"whose shards divide evenly into {num_microbatches} microbatches"
                )
        return order

    @functools.cached_property
    def ranges(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """By microbatch: the ranges [begin, end) of the batch's samples that it has, in its order."""
        starts = [0]
        for count in shard_sizes(sum(self.sizes), self.num_shards):
            starts.append(starts[-1] + count)
        found = []
        for size in self.sizes:
            parts = []
            for shard, count in enumerate(shard_sizes(size, self.num_shards)):
                parts.append((starts[shard], starts[shard] + count))
                starts[shard] += count
            found.append(tuple(parts))
        return tuple(found)

    def part(self, tensor: torch.Tensor, dim: int, *, microbatch: int, begin: int, end: int) -> torch.Tensor:
        """Samples [begin, end) of a microbatch, of a tensor that has the whole batch along `dim`; a view where it can
        be."""
        pieces, at = [], 0
        for first, last in self.ranges[microbatch]:
            low, high = max(begin - at, 0), min(end - at, last - first)
            if low < high:
                pieces.append(tensor.narrow(dim, first + low, high - low))
            at += last - first
        if not pieces:
            return tensor.narrow(dim, 0, 0)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def restored(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """A tensor that has the microbatches one after another along `dim`, with the samples in the batch's order; a
        sample may have several rows."""
        total = sum(self.sizes)
        if self.num_shards == 1 or tensor.size(dim) % total:
            return tensor
        order = torch.cat([torch.arange(*part, device="cpu") for parts in self.ranges for part in parts])
        dim, num_rows = dim % tensor.dim(), tensor.size(dim) // total
        rows = (torch.argsort(order)[:, None] * num_rows + torch.arange(num_rows, device="cpu")).flatten()
        return tensor.index_select(dim, rows.to(tensor.device))
