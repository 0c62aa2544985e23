"""What the ranks of a pipeline agree on before they do something together: that it is the same thing, and, before a
step's first action, what each knows of it. Where one refuses, nobody computes."""

import dataclasses
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate

from torch_xmesh.pipeline.ranks.exchange import TensorExchange
from torch_xmesh.pipeline.ranks.refused import StepRefusedError
from torch_xmesh.pipeline.ranks.transfers import Transfers
from torch_xmesh.plan_cache import Move

_UNKNOWN = -(1 << 62)


def scale_bits(scale: float) -> int:
    """A factor of the losses as a number that ranks can compare."""
    bits: int = struct.unpack("<i", struct.pack("<f", scale))[0]
    return bits


class DifferentCallsError(StepRefusedError):
    """Ranks called different things, which says more than why one of them refuses."""


CALLS = (
    *("step()", "evaluate()", "trace()", "timeline()", "summary()", "clip_grad_norm_()"),
    *("the scaler's unscale_() or step()", "state_dict()", "load_state_dict()"),
)
"""What all ranks call together."""


@dataclasses.dataclass(frozen=True)
class StepFacts:
    """What a rank knows of a step; None where it does not.

    Attributes:
        arguments, target: samples in them.
        shards: number of the batch's shards, where it comes sharded.
        is_sync: gradients are summed at its end.
        is_sharded: plain tensors are this rank's data shard; where it takes some.
        has_target, returns_outputs: on the last stage's ranks.
        loss_scale: `scale_bits` there.
        argument_shapes, target_shapes: a number of shapes and dtypes of the batch, where each rank gives a part of it.
    """

    arguments: int | None
    target: int | None
    shards: int | None
    is_sync: int | None
    is_sharded: int | None
    has_target: int | None
    returns_outputs: int | None
    loss_scale: int | None
    argument_shapes: int | None = None
    target_shapes: int | None = None


_TEXTS = {
    "is_sharded": "sharded=True (1) or not (0): {}",
    "arguments": "the arguments have {} samples",
    "target": "the target has {} samples",
    "shards": "the batch is sharded over {} data shards",
    "is_sync": "gradients are summed in this step (0 in no_sync): {}",
    "has_target": "a target is given (1) or not (0): {}",
    "returns_outputs": "return_outputs (1) or not (0): {}",
    "loss_scale": "the scaler's factor, as float32 bits, is {}",
    "argument_shapes": "its part of the arguments has shapes and dtypes of number {}",
    "target_shapes": "its part of the target has shapes and dtypes of number {}",
}


class StepAgreement:
    """One exchange per call, in which every rank says what it calls, what it knows and whether it refuses."""

    def __init__(self, transfers: Transfers, texts: Mapping[str, str]) -> None:
        """`texts`: of numbers that are agreed on besides StepFacts, by name."""
        self._transfers = transfers
        self._texts = {"call": "", **_TEXTS, **texts}
        everyone = transfers.everyone
        move = Move.of(
            (2 * len(self._texts) + 2,), torch.int64, (everyone, [Partial("max")]), (everyone, [Replicate()])
        )
        self._told = TensorExchange(transfers, "step", move)

    def agree(
        self,
        call: str,
        mine: StepFacts | None = None,
        others: Mapping[str, int] | None = None,
        refusal: str | None = None,
        has_news: bool = False,
    ) -> tuple[StepFacts, dict[str, int | None], bool]:
        """What the ranks know together, of the facts and of the other numbers, in a call of CALLS, and whether one has
        news; `refusal` says why this rank refuses it.

        Raises:
            StepRefusedError: on every rank, where one refuses, is in another call, or two disagree.
        """
        known = {} if mine is None else {k: v for k, v in vars(mine).items() if v is not None}
        known.update(others or {})
        known["call"] = CALLS.index(call)
        numbers = [sign * known[name] if name in known else _UNKNOWN for name in self._texts for sign in (1, -1)]
        told = self._told.exchange(
            torch.tensor([*numbers, int(has_news), int(refusal is not None)], device="cpu")
        ).tolist()
        pairs = {name: (told[2 * i], -told[2 * i + 1]) for i, name in enumerate(self._texts)}
        if told[-1] or any(most != least for most, least in pairs.values() if most != _UNKNOWN):
            self._refuse(known, refusal)
        del pairs["call"]
        found: Any = {name: None if most == _UNKNOWN else most for name, (most, _) in pairs.items()}
        agreed = StepFacts(**{name: found.pop(name) for name in _TEXTS})
        if None not in (agreed.arguments, agreed.target) and agreed.arguments != agreed.target:
            self._refuse(known, refusal)
        return agreed, found, bool(told[-2])

    def _refuse(self, known: Mapping[str, int], refusal: str | None) -> None:
        told = list(zip(self._transfers.ranks, self._transfers.gather("refusals", (known, refusal)), strict=True))
        calls = {rank: CALLS[numbers["call"]] for rank, (numbers, _) in told}
        if len(set(calls.values())) > 1:
            first = {call: rank for rank, call in reversed(calls.items())}
            texts = [f"rank {rank} calls {call}" for call, rank in sorted(first.items(), key=lambda item: item[1])]
            raise DifferentCallsError(ValueError(f"all ranks make the same call together, but {', '.join(texts)}"))
        for rank, (numbers, text) in told:
            if text is not None:
                what = "the step" if numbers["call"] < 2 else CALLS[numbers["call"]]
                raise StepRefusedError(ValueError(f"rank {rank} refused {what}: {text}"))
        found = {
            name: [(numbers[name], rank) for rank, (numbers, _) in told if name in numbers] for name in self._texts
        }
        for name, text in self._texts.items():
            for value, rank in found[name]:
                first, first_rank = found[name][0]
                if value != first and "{}" not in text:
                    raise StepRefusedError(ValueError(f"ranks {first_rank} and {rank} disagree: {text}"))
                if value != first:
                    here, there = f"{text.format(first)} on rank {first_rank}", f"{text.format(value)} on rank {rank}"
                    raise StepRefusedError(ValueError(f"ranks disagree: {here}, {there}"))
        (target, rank), (samples, other) = found["target"][0], found["arguments"][0]
        text = f"the target has {target} samples on rank {rank}, the arguments have {samples} on rank {other}"
        raise StepRefusedError(ValueError(text))
