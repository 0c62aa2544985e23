"""What a model cannot be, or have on it, where a plan says how it runs."""

import sys

from torch import nn

from torch_xmesh.parallelism.rows.experts import has_row
from torch_xmesh.pipeline.capture.hooks import check_recordable, has_hooks
from torch_xmesh.pipeline.capture.wrappers import averaging_wrappers


def check_plannable(model: nn.Module) -> None:
    """Raises ValueError for a model that is compiled, wrapped or sharded by others, and for hooks of gradients."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is an nn.Module, got {model!r} ({type(model).__name__})")
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for name, module in model.named_modules():
        what = f"module {name!r} ({type(module).__name__})" if name else f"the model ({type(module).__name__})"
        if isinstance(module, averaging_wrappers()):
            raise ValueError(f"{what} averages gradients itself: plan the plain module, module.module")
        if fsdp is not None and isinstance(module, fsdp.FSDPModule):
            raise ValueError(f"{what} is sharded by fully_shard: plan the plain module, and how it is sharded with it")
        if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
            raise ValueError(
                f"{what} is compiled, and would run uncompiled: plan the plain module, and compile the stages: "
                "engine.stage_module(stage).compile()"
            )
        if has_row(module):
            for inner, submodule in module.named_modules():
                if has_hooks(submodule):
                    raise ValueError(
                        f"module {f'{name}.{inner}'.rstrip('.')!r} has a hook: experts are not called as modules"
                    )
    check_recordable(model)
