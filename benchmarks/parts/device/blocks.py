"""What is compared on a device: ways to do the same, by turns, each checked element by element."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

RIVAL, OURS, CONTROL = "rival", "xmesh", "rival again"
_LEAST_SECONDS = 1e-9


@dataclasses.dataclass(frozen=True)
class Record:
    """`of_rival`: the rival's median time over this one's, 1 where they are equal and less where this is slower."""

    case: str
    method: str
    num_bytes: int
    seconds: float
    seconds_min: float
    seconds_max: float
    of_rival: float
    wrong: int
    runs: int

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def cells(self) -> list[str]:
        times = [f"{seconds * 1e3:.3f}" for seconds in (self.seconds, self.seconds_min, self.seconds_max)]
        rate = f"{self.num_bytes / self.seconds / 1e9:.2f}" if self.num_bytes else "-"
        size = f"{self.num_bytes / 2**20:.1f}"
        return [self.case, self.method, size, *times, rate, f"{self.of_rival:.3f}", str(self.runs), str(self.wrong)]


def records_of(
    case: str, num_bytes: int, seconds: dict[str, list[float]], wrong: dict[str, int], runs: int
) -> list[Record]:
    """One for each method, the rival among them."""
    rival = max(statistics.median(seconds[RIVAL]), _LEAST_SECONDS)
    return [
        Record(
            case,
            name,
            num_bytes,
            statistics.median(times),
            min(times),
            max(times),
            rival / max(statistics.median(times), _LEAST_SECONDS),
            wrong[name],
            runs,
        )
        for name, times in seconds.items()
    ]


@dataclasses.dataclass
class Block:
    """One way to get `wanted`, which is None on a rank that gets nothing. `read`: what has come."""

    run: Callable[[], object]
    read: Callable[[], torch.Tensor | None]
    wanted: torch.Tensor | None


def over_ranks(mine: Sequence[float]) -> torch.Tensor:
    """By rank, what each has measured."""
    everyone = torch.empty(dist.get_world_size(), len(mine), dtype=torch.float64)
    dist.all_gather(list(everyone.unbind(0)), torch.tensor(mine, dtype=torch.float64))
    return everyone


def timed(block: Block, repeats: int) -> tuple[float, int]:
    """From the first start to the last end of a run, and wrong elements, over all ranks."""
    before = block.read()
    if before is not None:
        before.fill_(-1)
    torch.accelerator.synchronize()
    dist.barrier()
    begin = time.monotonic()
    for _ in range(repeats):
        block.run()
    torch.accelerator.synchronize()
    end = time.monotonic()
    bad, found = 0, block.read()
    if found is not None and block.wanted is not None:
        bad = int((found.cpu() != block.wanted).sum())
    everyone = over_ranks([begin, end, bad])
    took = float(everyone[:, 1].max() - everyone[:, 0].min()) / repeats
    return took, int(everyone[:, 2].sum())


def compared(case: str, num_bytes: int, blocks: dict[str, Block], *, runs: int, repeats: int) -> list[Record]:
    """A round that does not count, then `runs` rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in blocks}
    wrong = dict.fromkeys(blocks, 0)
    for turn in range(runs + 1):
        for name, block in blocks.items():
            took, bad = timed(block, repeats)
            wrong[name] += bad
            if turn > 0:
                seconds[name].append(took)
    return records_of(case, num_bytes, seconds, wrong, runs)
