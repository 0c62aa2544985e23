"""The pipeline engine: a model cut into stages on meshes of their own, schedules, and their simulation."""

from torch_xmesh.pipeline.cut.partition import split_at
from torch_xmesh.pipeline.engine.engine import PipelineEngine
from torch_xmesh.pipeline.schedule.choice import ScheduleChoice, choose_schedule
from torch_xmesh.pipeline.schedule.schedule import Schedule
from torch_xmesh.pipeline.schedule.simulation import Costs, EdgeCosts, Simulation, StageCosts, simulate

__all__ = [
    "Costs",
    "EdgeCosts",
    "PipelineEngine",
    "Schedule",
    "ScheduleChoice",
    "Simulation",
    "StageCosts",
    "choose_schedule",
    "simulate",
    "split_at",
]
