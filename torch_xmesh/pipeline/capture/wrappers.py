"""Modules around a model that average gradients themselves."""

import sys

from torch.nn.parallel import DataParallel, DistributedDataParallel


def averaging_wrappers() -> tuple[type, ...]:
    """Their classes; FullyShardedDataParallel's where anybody has imported it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    more = () if fsdp is None else (fsdp.FullyShardedDataParallel,)
    return DistributedDataParallel, DataParallel, *more
