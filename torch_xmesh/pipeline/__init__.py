"""Pipelines: schedules and their simulation."""

from torch_xmesh.pipeline.schedule import Schedule
from torch_xmesh.pipeline.simulation import Costs, EdgeCosts, Simulation, StageCosts, simulate

__all__ = ["Costs", "EdgeCosts", "Schedule", "Simulation", "StageCosts", "simulate"]
