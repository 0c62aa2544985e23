"""Strategies as objects, for those who would rather not spell options in a string."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Broadcast:
    """AlpaComm's plan (MLSys'23, section 3): unit tasks with one sender each, chunks in a chain over the hosts.

    Args:
        senders: "size" balances bytes over the possible sender hosts (eq. 1-3 without order), "naive" takes the lowest.
        order: of the unit tasks: "best" of "dfs" (pruned) and "greedy" (randomized), one of them, or "naive".
        seed: of the randomized search.
        node_budget: search nodes, a measure that is the same on every CPU; None takes the default.
        collective: on an accelerator a unit task's chunks go to all its receivers by the inner backend's broadcast,
            on a communicator of these ranks, instead of along the chain. Same bytes. Of no effect on cpu.

    Values that there are not are a ValueError where the strategy is used.
    """

    senders: str = "size"
    order: str = "best"
    seed: int = 0
    node_budget: int | None = None
    collective: bool = False

    def __str__(self) -> str:
        options = f",seed={self.seed}" if self.seed else ""
        if self.node_budget is not None:
            options += f",node_budget={self.node_budget}"
        if self.collective:
            options += ",collective=1"
        return f"broadcast:{self.senders}+{self.order}{options}"
