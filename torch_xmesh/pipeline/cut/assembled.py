"""The values between the stages of a recording, what goes in and out of each stage, and its code."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from torch_xmesh.pipeline.capture.errors import CaptureError
from torch_xmesh.pipeline.capture.recording import Recording, TensorFacts, structure_of
from torch_xmesh.pipeline.cut.graph_cut import GraphCut
from torch_xmesh.pipeline.cut.infos import Affine, NotLinearError, TensorInfo, join
from torch_xmesh.pipeline.cut.stage_module import StageBuilder, StageCode
from torch_xmesh.pipeline.cut.value_info import ValueInfo
from torch_xmesh.pipeline.cut.values import OutputStructure, ValueName


@dataclasses.dataclass(frozen=True)
class Ports:
    """What goes into a stage and comes out of it, by name, in order; `model_inputs` are those that the user passes."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    model_inputs: tuple[str, ...]


class Assembled:
    """A recording, cut into stages.

    Attributes:
        names: names of the tensors that enter the model, cross stages or leave the model; inputs first, then by
            producer and order of execution.
        ports: by stage.
        outputs: the model's output over values.
        situation: that in which it runs, as Ways have it.
    """

    def __init__(self, cut: GraphCut) -> None:
        self.cut = cut
        self.recording = cut.recording
        last = cut.num_stages - 1
        outputs = list(dict.fromkeys(cut.output_nodes))
        placeholders = [node for node in self.recording.graph.nodes if node.op == "placeholder"]
        guarding = cut.guard_inputs()
        self.received: dict[fx.Node, list[int]] = {node: [] for node in placeholders}
        for stage, needs in enumerate(cut.needs):
            needs.received.update(dict.fromkeys(guarding))
            needs.received = dict.fromkeys(sorted(needs.received, key=cut.rank))
            for node in needs.received:
                self.received.setdefault(node, []).append(stage)
        for node in outputs:
            self.received.setdefault(node, [])
        ranked = sorted(self.received, key=self._rank)
        self.names = _names(ranked)
        self.ports = []
        for stage, needs in enumerate(cut.needs):
            inputs = tuple(self.names[node] for node in needs.received)
            made = [n for n in ranked if self.producer(n) == stage and self.received[n]] if stage < last else outputs
            model_inputs = tuple(self.names[node] for node in needs.received if node.op == "placeholder")
            self.ports.append(Ports(inputs, tuple(self.names[node] for node in made), model_inputs))
        leaves, structure = pytree.tree_flatten(self.recording.output)
        self.outputs = OutputStructure(
            tuple(ValueName(self.names[leaf]) if isinstance(leaf, fx.Node) else leaf for leaf in leaves), structure
        )
        self._nodes = {name: node for node, name in self.names.items()}
        self.situation = ""
        self._codes: dict[int, StageCode] = {}

    def _rank(self, node: fx.Node) -> tuple[int, int]:
        producer = self.producer(node)
        return (-1 if producer is None else producer, self.cut.order[node])

    def producer(self, node: fx.Node) -> int | None:
        """The stage that makes a value, None for the model's inputs."""
        if node.op == "placeholder":
            return None
        home, last = self.cut.home[node], self.cut.num_stages - 1
        return last if home is None or (self.cut.is_local(node, last) and not self.received[node]) else home

    def tensor(self, name: str) -> TensorFacts:
        """What a value was in the recording."""
        (found,) = self.recording.facts[self._nodes[name]].tensors
        return found

    def code(self, stage: int, ports: Ports) -> StageCode:
        """What a stage runs, with these inputs and outputs."""
        if stage not in self._codes:
            graph = StageBuilder(self.cut, stage, self.names).build(
                ports.inputs, [self._nodes[name] for name in ports.outputs]
            )
            self._codes[stage] = StageCode(
                graph,
                uses_rng=self.cut.draws_random_numbers(stage),
                has_gradients=self.recording.has_gradients,
                device=self.recording.device,
                way=self.recording.way,
                situation=self.situation,
            )
        return self._codes[stage]

    def values(self, infos: Mapping[str, TensorInfo], samples: int, is_fixed: bool) -> dict[str, ValueInfo]:
        """The values, by name."""
        found = {}
        for node, name in self.names.items():
            info, producer = infos[name], self.producer(node)
            found[name] = ValueInfo(
                name=name,
                producer=producer,
                consumers=tuple(sorted(stage for stage in self.received[node] if stage != producer)),
                shape=info.shape(samples),
                dtype=info.dtype,
                requires_grad=info.requires_grad,
                batch_dim=info.batch_dim,
                is_output=node in self.cut.output_nodes,
                tensor=info,
                samples=samples,
                fixed_batch=is_fixed,
                varies=self.recording.facts[node].varies and producer is not None and info.batch_dim is None,
            )
        return found

    def fit(self, base: "Assembled") -> None:
        """Calls the values as they are called in `base`; what both made at the same place, in other ways, is one.

        Raises:
            CaptureError: the stages' inputs and outputs are not those of `base`.
        """
        self._rename(self._called_otherwise(base))
        for stage, (mine, known) in enumerate(zip(self.ports, base.ports, strict=True)):
            if extra := [name for name in mine.inputs if name not in known.inputs]:
                raise CaptureError(
                    f"stage {stage} would need {extra[0]}, which it did not for the example: {self._difference(base)}"
                )
            if mine.outputs != known.outputs:
                raise CaptureError(
                    f"stage {stage} would make {list(mine.outputs)}, for the example it makes {list(known.outputs)}: "
                    f"{self._difference(base)}"
                )
            if more := self.cut.targets_of(stage) - base.cut.targets_of(stage):
                raise CaptureError(
                    f"stage {stage} would use {min(more)}, which it did not for the example: {self._difference(base)}"
                )

    def _called_otherwise(self, base: "Assembled") -> dict[str, str]:
        """The names in `base` of values of other names here: of each stage the outputs that only one of them has, in
        their order, where these are equally many and alike."""
        found: dict[str, str] = {}
        for mine, known in zip(self.ports, base.ports, strict=True):
            own = [name for name in mine.outputs if name not in known.outputs]
            theirs = [name for name in known.outputs if name not in mine.outputs]
            if len(mine.outputs) == len(known.outputs) and all(
                self._kind(name) == base._kind(other) for name, other in zip(own, theirs, strict=True)
            ):
                found.update(zip(own, theirs, strict=True))
        return found

    def _kind(self, name: str) -> Any:
        node, tensor = self._nodes[name], self.tensor(name)
        requires_grad = tensor.requires_grad and torch.is_grad_enabled()
        return self.producer(node), self.received[node], len(tensor.shape), tensor.dtype, requires_grad

    def _rename(self, names: Mapping[str, str]) -> None:
        def new(name: str) -> str:
            return names.get(name, name)

        self.names = {node: new(name) for node, name in self.names.items()}
        self._nodes = {name: node for node, name in self.names.items()}
        self.ports = [
            Ports(tuple(map(new, ports.inputs)), tuple(map(new, ports.outputs)), ports.model_inputs)
            for ports in self.ports
        ]
        leaves = tuple(
            ValueName(new(leaf.name)) if isinstance(leaf, ValueName) else leaf for leaf in self.outputs.leaves
        )
        self.outputs = OutputStructure(leaves, self.outputs.structure)

    def _difference(self, base: "Assembled") -> str:
        pairs = zip(self.recording.guards, base.recording.guards, strict=False)
        read = next((mine.source for mine, known in pairs if not known.gave(mine.value)), "")
        return f"the model takes another way at {read}" if read else "the model takes another way"


def _names(nodes: Sequence[fx.Node]) -> dict[fx.Node, str]:
    """Names that do not depend on what else is in the graph."""
    names: dict[fx.Node, str] = {}
    counts: dict[str, int] = {}
    for node in nodes:
        word = _word(node)
        count = counts[word] = counts.get(word, -1) + 1
        names[node] = f"{word}_{count}" if count else word
    return names


def _word(node: fx.Node) -> str:
    source = structure_of(node)
    if source is not None:
        return ".".join(map(str, (_word(source), *node.meta["path"])))
    if node.op == "placeholder":
        return str(node.target)
    if node.op in ("call_module", "get_attr"):
        word = str(node.target).replace(".", "_")
        return f"_{word}" if word[:1].isdigit() else word
    return getattr(node.target, "__name__", str(node.target)).strip("_")


def infos_of(runs: Sequence[Recording], base: Assembled, samples: int) -> dict[str, TensorInfo]:
    """What the values of `base`, the first of `runs`, are at any number of samples: the runs had `samples`, one and two
    more.

    Raises:
        NotLinearError: the runs differ in more than sizes.
    """
    position = {node: index for index, node in enumerate(base.recording.graph.nodes)}
    others = [list(run.graph.nodes) for run in runs[1:]]
    if any(not is_alike(base.recording, run) for run in runs[1:]):
        raise NotLinearError
    infos = {}
    for node, name in base.names.items():
        facts = [base.recording.facts[node]]
        facts += [run.facts[nodes[position[node]]] for run, nodes in zip(runs[1:], others, strict=True)]
        (info,) = join([(list(fact.leaves), fact.structure) for fact in facts], samples).leaves
        assert isinstance(info, TensorInfo)
        infos[name] = info
    return infos


def infos_like(known: Mapping[str, ValueInfo], found: Assembled, samples: int) -> dict[str, TensorInfo]:
    """What values are that were recorded once, with `samples`, where it is known of the same values of other sizes in
    which dims the samples are."""
    infos = {}
    for name in found.names.values():
        tensor = found.tensor(name)
        like = known[name].tensor.sizes if name in known else ()
        if len(like) != len(tensor.shape):
            raise CaptureError(f"value {name} has {len(tensor.shape)} dims, for the example it has {len(like)}")
        sizes = [
            Affine(size // samples, 0) if affine.per_sample and not affine.fixed and samples else Affine(0, size)
            for affine, size in zip(like, tensor.shape, strict=True)
        ]
        infos[name] = TensorInfo(tuple(sizes), tensor.dtype, tensor.requires_grad)
    return infos


def is_alike(recording: Recording, other: Recording) -> bool:
    """Whether two recordings made the same calls, sizes and other constants apart."""
    return len(recording.graph.nodes) == len(other.graph.nodes) and all(
        (a.op, _target(a)) == (b.op, _target(b)) for a, b in zip(recording.graph.nodes, other.graph.nodes, strict=True)
    )


def _target(node: fx.Node) -> Any:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__qualname__", str(node.target))


def cut_recording(recording: Recording, *, starts_of: Callable[[Recording], Sequence[int]]) -> Assembled:
    """The recording as stages that start at the nodes whose positions `starts_of` finds."""
    starts = starts_of(recording)
    position = {node: index for index, node in enumerate(recording.graph.nodes)}

    def stage_of(node: fx.Node) -> int:
        return sum(position[node] >= start for start in starts)

    return Assembled(GraphCut(recording, stage_of, num_stages=len(starts) + 1))
