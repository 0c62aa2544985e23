"""Who gives a part of a batch with ``sharded=True``."""

from torch_xmesh.pipeline.ranks.stage_mesh import StageMesh


class ByShard:
    """Each data shard of a stage; its ranks give the same.

    Attributes:
        counted: what a sampler counts.
        are_gathered: a stage's ranks take the whole batch, so that parts are gathered first.
    """

    counted = "data shards of a stage"
    are_gathered = False

    def number(self, mesh: StageMesh) -> int:
        """Into how many parts a stage's ranks cut the batch."""
        return mesh.num_shards

    def index(self, mesh: StageMesh) -> int:
        """Which of them this rank has, of a stage of its own."""
        return mesh.shard


class ByRank(ByShard):
    """Each rank of a stage, in the order of ranks."""

    counted = "ranks of a stage"
    are_gathered = True

    def number(self, mesh: StageMesh) -> int:
        """Into how many parts a stage's ranks cut the batch."""
        return len(mesh.ranks)

    def index(self, mesh: StageMesh) -> int:
        """Which of them this rank has, of a stage of its own."""
        return sorted(mesh.ranks).index(mesh.rank)
