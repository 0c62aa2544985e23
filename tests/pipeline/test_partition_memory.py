"""What split="auto" says that stages hold, against what autograd keeps of the stages themselves."""

from typing import Any

import pytest
import torch
from models import cases
from partition_cases import cut
from torch import nn

from torch_xmesh.pipeline.cut.balance import balance
from torch_xmesh.pipeline.cut.microbatch import leaf_specs
from torch_xmesh.pipeline.cut.partition import SplitAt, split_at
from torch_xmesh.pipeline.cut.profile import Profile
from torch_xmesh.pipeline.cut.profile_memory import Needed, Read, UnitCost, needed_bytes
from torch_xmesh.pipeline.cut.split_choice import check_limit, choose_split
from torch_xmesh.pipeline.cut.stage_program import StageProgram
from torch_xmesh.pipeline.cut.values import sorted_arguments

SAMPLES = 3
OUTPUT = SAMPLES * 16 * 4


class Block(nn.Module):
    """Keeps a tensor for backward in each of its rounds and returns one; its memory is none of its time on meta."""

    def __init__(self, rounds: int) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16, bias=False)
        self.rounds = rounds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for _ in range(self.rounds):
            x = torch.tanh(x)
        return x


def costs(model: nn.Module, args: Any, kwargs: Any = None, spec: Any = None) -> list[UnitCost]:
    arguments = sorted_arguments(args, kwargs)
    specs = leaf_specs(arguments[0], spec, "args") + leaf_specs(arguments[1], None, "kwargs")
    return Profile(model, arguments, specs, 1).units_with_memory()


def stage_bytes(program: StageProgram, inputs: list[torch.Tensor], received: list[torch.Tensor]) -> tuple[int, Any]:
    """The bytes that autograd keeps of a run besides what is the model's, with what came from other stages."""
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = program(*inputs)
    own = [*program.module.parameters(), *program.module.buffers()]
    own += [tensor for tensor in inputs if not any(tensor is other for other in received)]
    free = {tensor.untyped_storage().data_ptr() for tensor in own}
    sizes = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept + received}
    return sum(size for at, size in sizes.items() if at not in free), outputs


@pytest.mark.parametrize(
    "name", ["mlp_dropout", "gpt", "gpt_checkpoint", "unet", "lstm", "tied", "autocast", "bert", "moe"]
)
def test_stages_keep_what_was_foretold(name: str) -> None:
    case = next(case for case in cases() if case.name == name)
    torch.manual_seed(0)
    model = case.build()
    args, kwargs, _ = case.batch(SAMPLES)
    units = costs(model, args, kwargs, case.specs.get("args_chunk_spec"))
    needed = needed_bytes(units)
    for start in range(1, len(units), 1 + len(units) // 6):
        parts = cut(case, model, (units[start].name,), SAMPLES)
        values = parts.bind(args, kwargs)
        found = []
        for program in parts.stages:
            crossing = [name for name in program.input_values if parts.values[name].producer is not None]
            for name in crossing:
                values[name] = values[name].detach().clone().requires_grad_(parts.values[name].requires_grad)
            inputs = [values[name] for name in program.input_values]
            size, outputs = stage_bytes(program, inputs, [values[name] for name in crossing])
            parameters = sum(p.numel() * p.element_size() for p in program.module.parameters())
            found.append(Needed(4 * parameters, size))
            values.update(zip(program.output_values, outputs, strict=True))
        assert found == [needed[0, start], needed[start, len(units)]], units[start].name


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_block_counts_with_all_that_it_keeps(device: str) -> None:
    with torch.device(device):
        model, x = nn.Sequential(Block(10), nn.Linear(16, 16, bias=False)), torch.empty(SAMPLES, 16)
    first, second = costs(model, (x,))
    assert sum(first.kept.values()) == 10 * OUTPUT
    assert list(second.kept.values()) == [OUTPUT]
    needed = needed_bytes([first, second])
    assert [needed[key].per_microbatch for key in [(0, 1), (1, 2), (0, 2)]] == [10 * OUTPUT, OUTPUT, 10 * OUTPUT]


def test_stages_hold_what_they_share_once() -> None:
    units = [
        UnitCost("a", 1.0, {1: 100}, {0: 8}),
        UnitCost("b", 1.0, {}, {0: 8, 1: 4}, {"x": Read(0, frozenset({0}), 2)}),
        UnitCost("c", 1.0, {1: 100}, {2: 1}, {"x": Read(0, frozenset({0}), 2)}),
    ]
    needed = needed_bytes(units)
    assert needed[0, 3] == Needed(400, 13)
    assert needed[0, 2] == Needed(400, 12)
    assert needed[1, 3] == Needed(400, 7)
    assert needed[2, 3] == Needed(400, 3)


def test_balance_knows_how_many_microbatches_each_stage_holds() -> None:
    units = [UnitCost(str(index), 1.0, {}, {index: 10}) for index in range(4)]
    assert balance(units, 2, None, [3, 1]) == [2]
    assert balance(units, 2, 30, [3, 1]) == [1]
    assert balance(units, 2, 40, [1, 2]) == [2]
    with pytest.raises(ValueError, match="the largest single module call needs 40 bytes, all together 160, with 4"):
        balance(units, 2, 30, [4, 4])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_limit_moves_the_split(device: str) -> None:
    with torch.device(device):
        model, x = nn.Sequential(*(Block(10) for _ in range(4))), torch.empty(SAMPLES, 16)
    block = 4 * 4 * 16 * 16 + 10 * OUTPUT
    limit = 3 * block + OUTPUT  # a stage of three blocks receives a tensor
    found = choose_split(model, (x,), None, 2, memory_limit_bytes=limit, microbatches_in_flight=[3, 1])
    assert found in (SplitAt(("1",)), SplitAt(("1.inner",)))  # the same place, if the measured time has it opened
    with pytest.raises(ValueError, match="no split into 2 stages keeps memory_limit_bytes"):
        choose_split(model, (x,), None, 2, memory_limit_bytes=limit, microbatches_in_flight=[9, 9])
    if device == "meta":
        assert choose_split(model, (x,), None, 2) == SplitAt(("2",))


def test_modules_are_opened_to_keep_a_limit() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)), nn.Sequential(Block(400), Block(400)))
        x = torch.empty(SAMPLES, 16)
    limit = 650 * OUTPUT  # more than one of the two last blocks and all that is before them
    assert choose_split(model, (x,), None, 2, microbatches_in_flight=[1, 1]) == SplitAt(("5",))
    found = choose_split(model, (x,), None, 2, memory_limit_bytes=limit, microbatches_in_flight=[1, 1])
    assert found == SplitAt(("8.1",))


def test_limit_of_one_stage() -> None:
    model, x = Block(10), torch.empty(SAMPLES, 16)
    needed = 4 * 4 * 16 * 16 + 10 * OUTPUT
    assert choose_split(model, (x,), None, 1, memory_limit_bytes=needed) == SplitAt(())
    with pytest.raises(ValueError, match=f"all together {needed}"):
        choose_split(model, (x,), None, 1, memory_limit_bytes=needed - 1)


def test_limit_needs_an_automatic_split() -> None:
    with pytest.raises(ValueError, match='memory_limit_bytes=100 is for split="auto"'):
        check_limit(split_at("1"), 100)
