"""torch_xmesh: cross-mesh resharding of DTensors, and the c10d backend ``xmesh`` that carries it.

Importing the package registers the backend: ``torch.distributed.init_process_group("xmesh")``.
"""

from typing import TYPE_CHECKING, Any

import torch

try:
    from torch_xmesh._build_info import BUILT_WITH_TORCH
except ImportError as error:
    raise ImportError(
        "torch_xmesh is not built here; run `pip install --no-build-isolation -e .` in the repository's root"
    ) from error

if torch.__version__.split(".")[:2] != BUILT_WITH_TORCH.split(".")[:2]:
    raise ImportError(
        f"torch_xmesh was built against torch {BUILT_WITH_TORCH} and cannot be used with torch {torch.__version__}; "
        "reinstall it with `pip install --no-build-isolation .` beside this torch"
    )

from torch_xmesh import backend as _backend
from torch_xmesh.about import About, about
from torch_xmesh.backend import Options
from torch_xmesh.errors import PeerError, StageError
from torch_xmesh.parallelism import Compute, OperatorTimes, ParallelPlan, plan_parallel, presets
from torch_xmesh.pipeline import (
    Costs,
    EdgeCosts,
    PipelineEngine,
    Schedule,
    ScheduleChoice,
    Simulation,
    StageCosts,
    choose_schedule,
    simulate,
    split_at,
)
from torch_xmesh.plan import ReshardingPlan, plan_resharding
from torch_xmesh.resharding import reshard, reshard_many
from torch_xmesh.spec import Mesh, Spec, device_mesh, stage_meshes
from torch_xmesh.split_backward import split_backward
from torch_xmesh.strategies import Broadcast
from torch_xmesh.topology import Topology

if TYPE_CHECKING:
    from torch_xmesh import testing
else:

    def __getattr__(name: str) -> Any:
        if name == "testing":  # not needed to run, so imported when asked for
            import importlib

            return importlib.import_module("torch_xmesh.testing")
        raise AttributeError(f"module 'torch_xmesh' has no attribute {name!r}")


__version__ = "0.1.0"
__all__ = [
    "About",
    "Broadcast",
    "Compute",
    "Costs",
    "EdgeCosts",
    "Mesh",
    "OperatorTimes",
    "Options",
    "ParallelPlan",
    "PeerError",
    "PipelineEngine",
    "ReshardingPlan",
    "Schedule",
    "ScheduleChoice",
    "Simulation",
    "Spec",
    "StageCosts",
    "StageError",
    "Topology",
    "__version__",
    "about",
    "choose_schedule",
    "device_mesh",
    "plan_parallel",
    "plan_resharding",
    "presets",
    "reshard",
    "reshard_many",
    "simulate",
    "split_at",
    "split_backward",
    "stage_meshes",
    "testing",
]

_backend.register()
