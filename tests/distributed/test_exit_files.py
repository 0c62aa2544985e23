"""What a script leaves open is written when the interpreter ends, whatever function of its own the library has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# A process that has imported everything forks one for each case, which falls off the script's end, as a user's does.
# The file is the script's own, so that a function of the script that something keeps alive keeps the file open.
SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from torch.distributed.pipelining.microbatch import TensorChunkSpec
from torch.distributed.tensor import DTensor, Replicate
from torch import nn
from torch.nn import functional as F
import torch_xmesh as xm

torch.set_num_threads(1)
TWO = [xm.Mesh([0]), xm.Mesh([0])]

class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.log = log
        return x * scale
    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None

class OwnWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
    def forward(self, x):
        return F.linear(x, Doubled.apply(self.weight, 2.0))

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
    def forward(self, x):
        return Doubled.apply(self.linear(x), 2.0)

def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

def make(net=None, steps=1, **more):
    given = {"split": xm.split_at("1"), "num_microbatches": 2, "loss_fn": F.mse_loss, "meshes": TWO, **more}
    engine = xm.PipelineEngine(net or model(), (torch.ones(2, 4),), **given)
    for _ in range(steps):
        engine.step(torch.ones(4, 4), target=torch.ones(4, 4))
    return engine

def fails():
    def loss(output, target):
        raise FileNotFoundError("no such loss")
    try:
        make(loss_fn=loss)
    except xm.StageError as error:
        return error

def with_hooks(register):
    net = model()
    register(net)
    return make(net)

def planned(**more):
    net = model()
    options = {"devices": xm.Mesh([[0]]), "num_microbatches": 2, "compute": xm.Compute(flops=1e11, bytes_per_s=1e10),
               "topology": xm.Topology(devices_per_host=1, nic_bytes_per_s=10**8, local_bytes_per_s=10**10)}
    plan = xm.presets.data_parallel(net, (torch.ones(2, 4),), **options)
    engine = xm.PipelineEngine(net, (torch.ones(2, 4),), plan=plan, **more)
    engine.step(torch.ones(4, 4), target=torch.ones(4, 4))
    return engine

def split(network):
    x = torch.ones(2, 4, requires_grad=True)
    return xm.split_backward(network(x).sum(), None, x)[1]

def resharded():
    x = DTensor.from_local(torch.ones(4), xm.device_mesh(xm.Mesh([0])), [Replicate()])
    x.requires_grad_()
    y = xm.reshard(x, xm.Mesh([0]), [Replicate()])
    (2 * y).to_local().sum().backward()
    return y, xm.reshard(x.detach(), xm.Mesh([0]), [Replicate()], async_op=True)

def reduced():
    work = dist.all_reduce(torch.ones(4), async_op=True)
    return work.get_future().then(lambda future: future.value())

def optimized():
    engine = make(steps=0)
    optimizer = torch.optim.SGD(engine.parameters(), 0.1)
    scaler = engine.scaler(torch.amp.GradScaler("cpu"))
    engine.step(torch.ones(4, 4), target=torch.ones(4, 4))
    scaler.step(optimizer)
    return engine

CASES = {
    "loss_fn": lambda: make(loss_fn=lambda output, target: F.mse_loss(output, target)),
    "a loss_fn that raises": fails,
    "init_fn": lambda: make(nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Linear(4, 4, device="meta")),
                            init_fn=lambda module: [nn.init.ones_(one) for one in module.parameters(recurse=False)]),
    "parallelize": lambda: make(parallelize=lambda stage, module, mesh: module),
    "output_merge_spec": lambda: make(output_merge_spec=TensorChunkSpec(0)),
    "boundary_placements": lambda: make([Own(), Own()], split=None),
    "split I and W": lambda: make(nn.Sequential(Own(), OwnWeights()), schedule="zb_h1"),
    "schedule auto": lambda: make(loss_fn=lambda output, target: F.mse_loss(output, target), schedule="auto", steps=3),
    "forward hooks": lambda: with_hooks(lambda net: net[0].register_forward_hook(lambda *given: None)),
    "forward pre-hooks": lambda: with_hooks(lambda net: net[1].register_forward_pre_hook(lambda *given: None)),
    "backward hooks": lambda: with_hooks(lambda net: net[1].register_full_backward_hook(lambda *given: None)),
    "gradient hooks": lambda: with_hooks(lambda net: net[0].weight.register_hook(lambda gradient: gradient)),
    "plan": lambda: planned(loss_fn=lambda output, target: F.mse_loss(output, target)),
    "split_backward": lambda: [one for one in [split(Own()), split(OwnWeights())] if one() is None],
    "split_backward, only its first half": lambda: [split(Own()), split(OwnWeights())],
    "reshard": resharded,
    "a future": reduced,
    "scaler": optimized,
}

def child(name, path, how):
    global log, kept
    log = open(path, "w")
    log.write("written")
    dist.init_process_group("xmesh", store=dist.HashStore(), rank=0, world_size=1)
    kept = CASES[name]()
    if "close" in how and isinstance(kept, xm.PipelineEngine):
        kept.close()
    if "destroy" in how:
        dist.destroy_process_group()
    if how == "raise":
        raise KeyError("the script's own")

ENDS = ["leave", "close and destroy"]
for name in CASES:
    for how in [*ENDS, "close", "destroy", "raise"] if name in ("loss_fn", "plan") else ENDS:
        path = f"{sys.argv[1]}/{name}, {how}"
        pid = os.fork()
        if pid == 0:
            child(name, path, how)
            sys.exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with open(path) as found:
            text = found.read()
        if (code, text) != (int(how == "raise"), "written"):
            print(f"{name}, {how}: exit code {code}, the file has {text!r}", flush=True)
"""

# torch itself keeps a script's globals alive where they hold a tensor with a hook of the script's (but for hooks on
# parameters' gradients), or a graph with an autograd function of the script's: none of the cases leaves such a thing.


@pytest.mark.timeout(600)
def test_files_that_a_script_leaves_open_are_written(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ran.stdout == "", ran.stdout + ran.stderr
    assert ran.returncode == 0, ran.stderr
