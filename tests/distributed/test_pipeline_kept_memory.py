"""What a rank holds of a model: its own stages, also when the engine and the user's own name for the model are all that
refers to it; nothing of the other stages, neither of a real model nor of one on meta."""

import gc
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

import torch_xmesh as xm
from torch_xmesh.testing import spawn

WIDTH, DEPTH = 64, 6
LAYER = 4 * (WIDTH * WIDTH + WIDTH)


def held_bytes() -> int:
    """Bytes of all real tensors in this process, each storage counted once."""
    gc.collect()
    tensors = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    storages = {
        one.untyped_storage()._cdata: one.untyped_storage().nbytes()
        for one in tensors
        if not isinstance(one, FakeTensor) and not one.is_meta
    }
    return sum(storages.values())


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def make(model: nn.Module, meshes: Any) -> xm.PipelineEngine:
    return xm.PipelineEngine(
        model,
        (torch.empty(2, WIDTH, device="meta"),),
        meshes=meshes,
        split=xm.split_at("2", "5"),
        num_microbatches=2,
        loss_fn=F.mse_loss,
    )


def hold(rank: int, world_size: int) -> None:
    meshes = [xm.Mesh([0]), xm.Mesh([1]), xm.Mesh([2])]
    layers = (2, 3, 1)[rank]
    x = torch.ones(4, WIDTH)
    for device in ("cpu", "meta"):
        before = held_bytes()
        with torch.device(device):
            model: nn.Module | None = build()
        assert model is not None
        whole = held_bytes() - before
        assert whole >= LAYER * DEPTH if device == "cpu" else whole < LAYER
        engine = make(model, meshes)
        del model
        own = layers * LAYER
        assert own <= held_bytes() - before < own + LAYER // 2, (device, held_bytes() - before, own)
        engine.step(x, target=x)
        engine.zero_grad(set_to_none=True)
        engine.step(x[:, :], target=x)
        engine.zero_grad(set_to_none=True)
        assert held_bytes() - before < own + LAYER, device
        assert f"stage 1: {3 * LAYER // 4} parameters" in str(engine.partition)
        engine.close()
        del engine


def test_a_rank_holds_its_own_stages_only() -> None:
    spawn(hold, 3, timeout=60)
