"""The modules that are looked into, so that stages can start inside of them."""

import sys
from collections.abc import Iterable, Mapping

from torch import nn

from torch_xmesh.pipeline.capture.hooks import has_hooks


def opened_modules(names: Iterable[str]) -> frozenset[str]:
    """All modules that contain one of the named ones."""
    parts = [name.split(".") for name in names]
    return frozenset(".".join(part[:depth]) for part in parts for depth in range(len(part)))


def numbers_of(modules: Mapping[str, nn.Module]) -> dict[str, float]:
    """The numbers that are attributes of modules, by path; `modules` by name."""
    return {
        f"{name}.{key}" if name else key: value
        for name, module in modules.items()
        for key, value in vars(module).items()
        if type(value) in (int, float)
    }


def why_closed(module: nn.Module) -> str | None:
    """What would be lost if a module were looked into, None where nothing would."""
    if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
        return (
            "is compiled: it would run uncompiled; compile the modules inside that no stage cuts, or whole stages: "
            "parallelize=lambda stage, module, mesh: torch.compile(module)"
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        return "is sharded by fully_shard: call that in parallelize=, on the stage"
    if has_hooks(module):
        return (
            "has hooks: they would run while the model is recorded, not in training; move the split point out of it or "
            "register the hooks on the modules inside"
        )
    return None


def check_opened(model: nn.Module, opened: Iterable[str]) -> None:
    """Raises ValueError for modules that cannot be looked into."""
    for name in sorted(opened):
        module = model.get_submodule(name)
        why = why_closed(module)
        if why is not None:
            where = f"module {name!r}" if name else "the model"
            raise ValueError(f"a stage starts inside {where} ({type(module).__name__}), which {why}")
