"""What an engine's boundaries cost, for the simulator: its own plans' predictions."""

from collections.abc import Sequence

from torch_xmesh.pipeline.engine.boundary import Boundaries, Edge
from torch_xmesh.pipeline.ranks.transfers import Transfers
from torch_xmesh.pipeline.schedule.simulation import Costs, EdgeCosts, StageCosts
from torch_xmesh.plan_cache import PlanOptions
from torch_xmesh.topology import Topology


def costs_of(
    transfers: Transfers,
    boundaries: Boundaries,
    *,
    stages: Sequence[StageCosts],
    topology: Topology | None,
    overlap: bool,
    samples: int | None = None,
) -> Costs:
    """Stages as given; each edge takes what the plan of one microbatch is predicted to take, of `samples` samples or as
    the example, each way, on the links of `topology`, by default those for which it is planned."""
    plan_options = PlanOptions(boundaries.plan_options.strategy, topology or boundaries.plan_options.topology)

    def seconds(edge: Edge, is_gradient: bool) -> float:
        moves = boundaries.moves(edge, samples or edge.values[0].samples, is_gradient)
        return transfers.plans.plan(moves, plan_options).predicted_seconds if moves else 0.0

    edges: dict[tuple[int, int], EdgeCosts | float] = {}
    for edge in boundaries.edges:
        ways = [0.0, 0.0] if boundaries.is_local(edge) else [seconds(edge, False), seconds(edge, True)]
        edges[edge.from_stage, edge.to_stage] = EdgeCosts(
            forward_seconds=ways[0], backward_seconds=ways[1], has_gradient=edge.has_gradient
        )
    return Costs(stages=stages, edges=edges, overlap=overlap, blocks_receiver=False)
