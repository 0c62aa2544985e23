"""Automatic plans: from a model and devices to stages, their meshes, and how each operator is sharded."""

from torch_xmesh.parallelism import presets
from torch_xmesh.parallelism.compute import Compute
from torch_xmesh.parallelism.operator_times import OperatorTimes
from torch_xmesh.parallelism.plan import ParallelPlan
from torch_xmesh.parallelism.plan_parallel import plan_parallel

__all__ = ["Compute", "OperatorTimes", "ParallelPlan", "plan_parallel", "presets"]
