"""Every model of the zoo on data shards and on one mesh of several stages, and each obstacle at a stage's boundary."""

from __future__ import annotations

from pipeline_cases import Run, cases, train_and_compare

from torch_xmesh.testing import spawn

SCHEDULES = ("eager_1f1b", "1f1b", "gpipe")
TWO = ([0, 1], [2, 3])
ELSEWHERE = ("mlp", "mlp_dropout", "gpt", "unet")  # on these meshes already, in test_pipeline.py
SHARDED = [
    Run(case.name, case.splits[0][:1], TWO, SCHEDULES[index % 3], microbatches=2, samples=8, steps=2)
    for index, case in enumerate(cases())
    if case.name not in ELSEWHERE
]
LOCAL = [
    Run(case.name, split, ([0],) * (len(split) + 1), "gpipe", microbatches=2, samples=5, steps=2)
    for case in cases()
    for split in case.splits[-1:]
]
FIVE = [
    Run("unet", ("encoders.1", "attention", "decoders.0", "head"), ([0], [1], [2], [3], [0]), "gpipe", 3, 7),
    Run("conv", ("norm1", "body.1", "body.2", "head"), ([0], [1], [0], [1], [0]), "gpipe", 3, 7),
]


def train_all(rank: int, world_size: int, runs: list[Run]) -> None:
    for run in runs:
        if rank in run.ranks:
            print(f"at {run}", flush=True)  # shown of a rank that hangs
            train_and_compare(run)


def test_models_on_data_shards() -> None:
    spawn(train_all, 4, SHARDED, timeout=240)


def test_models_whose_stages_share_ranks() -> None:
    spawn(train_all, 4, FIVE + LOCAL, timeout=240)
