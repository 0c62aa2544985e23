"""What a pipeline is for the batches of its steps: stages at the inputs' sizes, and how batches are cut there."""

from typing import Any

from torch_xmesh.digests import digest_of
from torch_xmesh.pipeline.capture.regions import autocasts
from torch_xmesh.pipeline.cut.values import MOST_SIZES, Shapes
from torch_xmesh.pipeline.engine.auto import Cuts, StepPlan
from torch_xmesh.pipeline.engine.place import EnginePlace
from torch_xmesh.pipeline.engine.sample_order import SampleOrder
from torch_xmesh.pipeline.engine.setup import describe_values
from torch_xmesh.pipeline.engine.sizes import SizedPlace
from torch_xmesh.pipeline.engine.step_batch import StepBatch
from torch_xmesh.pipeline.ranks.refused import StepRefusedError


class SizedPlaces:
    """The places that a pipeline's last steps had, by sizes of inputs and what autocast does."""

    def __init__(self, place: EnginePlace) -> None:
        self._place = place
        self._sized: dict[Any, SizedPlace] = {}  # the last ones used
        self._last_cut: dict[tuple[int, int], int] = {}  # into so many microbatches, by samples and shards

    @property
    def last_key(self) -> Any:
        """What the last step's place is known by."""
        return next(reversed(self._sized))

    def number(self, batch: tuple[int, int]) -> int:
        """Into how many microbatches a batch of so many samples and shards will probably be cut."""
        return self._last_cut.get(batch, self._place.numbers(batch)[0])

    def foreseen(self, shapes: Shapes) -> SizedPlace | None:
        """The place of the next step, if the inputs that this rank does not read have the sizes that they had last."""
        for (known, modes), sized in reversed(self._sized.items()):
            if modes == autocasts() and all(shapes.get(name, shape) == shape for name, shape in known):
                return sized
        return None

    def ready(
        self, given: StepBatch, shapes: Shapes, batch: tuple[int, int], is_train: bool
    ) -> tuple[SizedPlace, SampleOrder, Cuts, StepPlan]:
        """The place for inputs of these shapes, and how a batch of so many samples and shards is cut and run there.
        Called by all ranks alike, which know of each other's refusal.

        Raises:
            StepRefusedError: the stages do not work for it, or cannot share it out, or no schedule keeps the limit.
        """
        key = tuple(shapes.items()), autocasts()
        sized = self._sized.pop(key, None)
        if sized is None or batch not in sized.orders:
            sized = self._agree_on(sized, given, shapes, batch)
        _put_last(self._sized, key, sized)
        orders = sized.orders[batch]
        cuts = Cuts(batch[0], max(batch[1], self._place.most_shards), key, tuple(orders))
        plan = self._place.plan(cuts, is_train=is_train)
        order = orders[plan.schedule.num_microbatches]
        _put_last(self._last_cut, batch, len(order.sizes))
        return sized, order, cuts, plan

    def _agree_on(
        self, sized: SizedPlace | None, given: StepBatch, shapes: Shapes, batch: tuple[int, int]
    ) -> SizedPlace:
        """The place with the orders into which all ranks can cut such a batch."""
        transfers = self._place.transfers
        failure, text, found = None, None, ""
        orders: dict[int, SampleOrder] = {}
        try:
            sized = sized or SizedPlace.at(self._place, shapes, given.named_inputs())
            orders = sized.orders_of(*batch)
            if given.order is not None and given.order in orders.values():
                given.find_codes(sized)
            found = digest_of(describe_values(sized.partition))
        except ValueError as error:
            failure, text = error, str(error)
        told = transfers.gather("sizes", (text, found, list(orders)))
        if failure is not None:
            raise StepRefusedError(failure) from failure
        for rank, (refusal, other, _) in zip(transfers.ranks, told, strict=True):
            if refusal is not None:
                raise StepRefusedError(ValueError(f"rank {rank} refused the step: {refusal}"))
            if other != told[0][1]:
                text = f"ranks disagree on the stages' values for inputs of shapes {list(shapes.values())}"
                raise StepRefusedError(ValueError(f"{text}: ranks {transfers.ranks[0]} and {rank}"))
        assert sized is not None
        shared = set(orders).intersection(*(numbers for _, _, numbers in told))
        if not shared:
            text = f"there is no number of microbatches into which all ranks can cut a batch of {batch[0]} samples"
            raise StepRefusedError(ValueError(text))
        sized.orders[batch] = {number: orders[number] for number in sorted(shared)}
        return sized


def _put_last(kept: dict[Any, Any], key: Any, value: Any) -> None:
    """As the last one; the first one goes where that is one too many."""
    kept[key] = value
    if len(kept) > MOST_SIZES:
        del kept[next(iter(kept))]
