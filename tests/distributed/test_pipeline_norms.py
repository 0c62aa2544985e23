"""Norms of the whole model's gradients, against torch.nn.utils.clip_grad_norm_ in one process: every order, with nan
and infinities in any stage, dtypes, parameters in parts, no gradients."""

from __future__ import annotations

import copy
import itertools
import math
import struct
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_cases import engine_of_layers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torch_xmesh as xm
from torch_xmesh.testing import spawn

INF, NAN = math.inf, math.nan
ORDERS = (0.5, 1, 2, 3, INF, 0, -INF, -1)


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self.dtype)


def layers(*dtypes: torch.dtype) -> nn.Sequential:
    """A linear layer of each dtype after a cast to it."""
    return nn.Sequential(*(m for dtype in dtypes for m in (Cast(dtype), nn.Linear(4, 4, dtype=dtype))))


def kinds(world: Any) -> Iterator[tuple[str, nn.Module, xm.PipelineEngine]]:
    """By name: the whole model, and an engine of it on four ranks."""
    f32, f64, bf16, f16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
    for name, dtypes in {
        "float32": (f32, f32, f32, f32),
        "float64": (f64, f64, f64, f64),
        "one in float64": (f32, bf16, f64, f32),
        "half and bfloat16": (f16, bf16, f16, bf16),
        "bfloat16": (bf16, bf16, bf16, bf16),
    }.items():
        model = layers(*dtypes)
        yield name, model, engine_of_layers(copy.deepcopy(model), (1, 4), "2", "4", "6", num_microbatches=2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    shards = [xm.Mesh([0, 1]), xm.Mesh([2, 3])]
    made = engine_of_layers(copy.deepcopy(model), (1, 4), "1", num_microbatches=2, meshes=shards)
    yield "data shards", model, made
    yield "parts", *in_parts(world)


def in_parts(world: Any) -> tuple[nn.Module, xm.PipelineEngine]:
    """Rows and columns over two devices: of three, and of one, so that a device has nothing of it."""
    model = nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 6), nn.Linear(6, 1), nn.Linear(1, 6))

    def parallelize(stage: int, module: nn.Module, mesh: Any) -> nn.Module:
        first, second = (module.get_submodule(str(2 * stage + i)) for i in (0, 1))
        for one, how in ((first, ColwiseParallel()), (second, RowwiseParallel())):
            parallelize_module(one, world["tp"], how)
        return module

    meshes = [xm.Mesh([0, 1]), xm.Mesh([2, 3])]
    return model, engine_of_layers(
        copy.deepcopy(model), (1, 6), "2", num_microbatches=2, meshes=meshes, parallelize=parallelize
    )


def set_gradients(model: nn.Module, poison: tuple[str, float] | None = None, *, zero: str = "", none: str = "") -> None:
    """`poison`: a parameter's name, and its gradient's last element; `zero` and `none`: those that begin so."""
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        drawn = 3 * torch.randn(parameter.shape, dtype=torch.float64).to(parameter.dtype)
        if zero and name.startswith(zero):
            drawn = torch.zeros_like(drawn)
        if poison is not None and name == poison[0]:
            drawn.flatten()[-1] = poison[1]
        parameter.grad = None if none and name.startswith(none) else drawn


def take_gradients(engine: xm.PipelineEngine, model: nn.Module) -> None:
    """Those of the whole model, as the engine's parameters lie."""
    for name, parameter in engine.named_parameters():
        grad = model.get_parameter(name).grad
        if grad is not None and isinstance(parameter, DTensor):
            grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = None if grad is None else grad.clone()


def in_float64(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters with the model's gradients, whose norm torch adds up in float64: halves would lose in their own type
    what the engine keeps."""
    out = {name: nn.Parameter(torch.zeros_like(p, dtype=torch.float64)) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        out[name].grad = None if parameter.grad is None else parameter.grad.double()
    return out


def assert_same_gradients(engine: xm.PipelineEngine, wanted: dict[str, nn.Parameter], where: str) -> None:
    for name, parameter in engine.named_parameters():
        found, grad = parameter.grad, wanted[name].grad
        assert (found is None) == (grad is None), where
        if found is not None and grad is not None:
            whole = found.full_tensor() if isinstance(found, DTensor) else found
            text = f"{where}: {name}: "
            torch.testing.assert_close(whole, grad.to(whole.dtype), equal_nan=True, msg=text.__add__)


def assert_equal_everywhere(norm: torch.Tensor, where: str) -> None:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (struct.pack("d", norm.item()), str(norm.dtype), norm.shape))
    assert len(set(told)) == 1, f"{where}: {told}"


def clip_alike(kind: str, model: nn.Module, engine: xm.PipelineEngine) -> None:
    names = [name for name, _ in model.named_parameters()]
    states: list[dict[str, Any]] = [{}, {"zero": names[0][0]}, {"none": names[-1][0]}, {"none": ""}]
    states += [{"poison": (name, value)} for name in (names[0], names[-2], names[-1]) for value in (NAN, INF, -INF)]
    for state, p in itertools.product(states, ORDERS):
        foreach = (None, True, False)[int(abs(p)) % 3] if math.isfinite(p) else None
        where = f"{kind}, p={p}, {state}"
        set_gradients(model, **state)
        take_gradients(engine, model)
        dtype = torch.nn.utils.get_total_norm([q.grad for q in model.parameters() if q.grad is not None], p).dtype
        exact = in_float64(model)
        wanted = torch.nn.utils.clip_grad_norm_(exact.values(), 1.5, p)
        norm = engine.clip_grad_norm_(1.5, p, foreach=foreach)
        torch.testing.assert_close(norm, wanted.to(dtype), equal_nan=True, msg=f"{where}: ".__add__)
        assert_equal_everywhere(norm, where)
        assert_same_gradients(engine, exact, where)


def like_torch(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    world = init_device_mesh("cpu", (2, 2), mesh_dim_names=("row", "tp"))
    for kind, model, engine in kinds(world):
        with engine:
            clip_alike(kind, model, engine)
            for parameter in engine.parameters():
                parameter.grad = None
            for p in ORDERS:
                norm = engine.clip_grad_norm_(1.0, p)
                assert norm.dtype == torch.float32, kind
                assert norm.item() == 0.0, (kind, p)
            dist.barrier()


def test_like_torch() -> None:
    spawn(like_torch, 4, timeout=300)


def errors(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = layers(*[torch.float32] * 2)
    with engine_of_layers(copy.deepcopy(model), (1, 4), "2", num_microbatches=2) as engine:
        for value in (NAN, INF, -INF):
            set_gradients(model, ("1.weight", value))
            take_gradients(engine, model)
            with pytest.raises(RuntimeError, match=r"the norm of order 2.0 of the gradients is (nan|inf), so they are"):
                engine.clip_grad_norm_(1.0, error_if_nonfinite=True)
            assert_same_gradients(engine, in_float64(model), "refused")
        wrong: list[tuple[tuple[Any, ...], str]] = [
            ((NAN,), r"max_norm is a number, got nan \(float\)"),
            ((1.0, NAN), r"norm_type is a number, got nan \(float\)"),
            ((1.0, "two"), r"norm_type is a number, got 'two' \(str\)"),
            ((None,), r"max_norm is a number, got None \(NoneType\)"),
        ]
        for arguments, text in wrong:
            told = "" if rank == 1 else r"rank 1 refused clip_grad_norm_\(\): "
            with pytest.raises(ValueError, match=told + text):
                engine.clip_grad_norm_(*(arguments if rank == 1 else (1.0,)))
        set_gradients(model)
        take_gradients(engine, model)
        different: list[tuple[tuple[Any, ...], tuple[Any, ...], str]] = [
            ((1.0,), (2.0,), "ranks disagree on max_norm: 1 on rank 0, 2 on rank 1"),
            ((1.0, 2), (1.0, INF), "ranks disagree on norm_type: 2 on rank 0, inf on rank 1"),
            ((1.0, 0), (1.0, -INF), "ranks disagree on norm_type: 0 on rank 0, -inf on rank 1"),
            ((1.0, 2, True), (1.0, 2, False), "ranks disagree on error_if_nonfinite: 1 on rank 0, 0 on rank 1"),
        ]
        for here, there, text in different:
            with pytest.raises(ValueError, match=text):
                engine.clip_grad_norm_(*(there if rank else here))
            assert_same_gradients(engine, in_float64(model), text)
        assert engine.clip_grad_norm_(1.0, "inf").isfinite()  # type: ignore[arg-type]
        dist.barrier()


def test_errors() -> None:
    """A norm that is not finite, arguments that are no numbers, and ranks that pass others: told to all, and nothing
    is changed."""
    spawn(errors, 2, timeout=60)
