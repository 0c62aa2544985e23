"""Processes end as they should when a script is over, whether or not it destroyed its groups: with 0, and in time."""

import subprocess
import sys

import pytest

# A process that has imported everything forks both ranks of each run, so that a run takes a second; a rank falls off
# the script's end, as a user's does. Its threads are at work until then: gloo's drop the last references to tensors.
SCRIPT = """
import os, socket, sys
import torch, torch.distributed as dist
from torch import nn
from torch.nn import functional as F
import torch_xmesh as xm

runs, destroys = int(sys.argv[1]), sys.argv[2] == "destroy"
torch.set_num_threads(1)

def work(rank, port):
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("xmesh", store=store, rank=rank, world_size=2)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    engine = xm.PipelineEngine(model, (torch.empty(2, 8),), meshes=[xm.Mesh([0]), xm.Mesh([1])],
                               split=xm.split_at("2"), num_microbatches=2, loss_fn=F.mse_loss)
    engine.step(torch.ones(4, 8), target=torch.zeros(4, 8))
    for _ in range(4):
        dist.all_reduce(torch.ones(1000))
    if destroys:
        dist.destroy_process_group()

for run in range(runs):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            work(rank, port)
            sys.exit(0)
    codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    if codes != [0, 0]:
        print("run", run, "ended with", codes, flush=True)
"""


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("runs", [3, pytest.param(500, marks=[pytest.mark.soak, pytest.mark.timeout(6000)])])
@pytest.mark.parametrize("how", ["destroy", "leave"])
def test_ranks_end_with_zero(how: str, runs: int) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(runs), how],
        capture_output=True,
        text=True,
        timeout=60 + 10 * runs,
        check=False,
    )
    assert ran.stdout == "", ran.stdout + ran.stderr
    assert ran.returncode == 0, ran.stderr
