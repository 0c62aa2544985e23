"""Strategies as objects, for those who would rather not spell options in a string."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Broadcast:
    """AlpaComm's plan (MLSys'23, section 3): unit tasks with one sender each, chunks in a chain over the hosts.

    Args:
        senders: how each unit task's sender host is chosen: "size" balances bytes over the possible hosts (eq. 1-3
            without order), "naive" takes the lowest.
        order: how unit tasks are ordered: "dfs" (a pruned search), "greedy" (a randomized one), "best" (the best of
            these) or "naive" (as they come).
        seed: seed of the randomized search.
        node_budget: how many nodes the searches may visit, the same on every CPU; None takes the default.
        collective: on an accelerator, send a unit task's chunks to all its receivers by the inner backend's broadcast,
            on a communicator of these ranks, instead of along the chain. The bytes are the same. No effect on cpu.

    A wrong value raises ValueError when the strategy is used, not here.
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
