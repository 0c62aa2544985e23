"""Modules that are called as one, on whole tensors, since what they do inside cannot be done on parts."""

from collections.abc import Iterable, Iterator

import torch
from torch import fx, nn

from torch_xmesh.parallelism.operators import Recorded
from torch_xmesh.pipeline.capture.recording import Recording, nodes_behind


def modules_called_whole(recorded: Recorded, model: nn.Module) -> set[str]:
    """The innermost modules, the model itself left out, around what can be run on whole tensors only: writes to buffers
    that several operators read (the vectors of spectral norm), and gradients that the forward itself computes (forces,
    of an energy), with all that lies between what they are of and what they are by."""
    owners = {name.rpartition(".")[0] for name in changed_in_other_ways(recorded, model)}
    around = {_common(map(_module_of, _differentiated(node, recorded.recording))) for node in gradients_of(recorded)}
    return (owners | around) - {""}


def changed_in_other_ways(recorded: Recorded, model: nn.Module) -> Iterator[str]:
    """Buffers that the forward changes, but not by one operator that alone reads them, or by the one module that has
    them and is called as one."""
    readers: dict[str, int] = {}
    for site in recorded.sites:
        for name in {value.name for value in site.sources if value.is_parameter}:
            readers[name] = readers.get(name, 0) + 1
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, changer in recorded.recording.changed_tensors.items():
        if name in parameters or name.endswith("num_batches_tracked"):  # a counter that nothing here reads
            continue
        changers = [number for number, site in enumerate(recorded.sites) if site.node is changer]
        is_constant = any(recorded.forward.operators[number].is_constant for number in changers)
        is_inside = changer.op == "call_module" and name.startswith(f"{changer.target}.")
        if readers.get(name, 0) != (0 if is_inside else 1) or not changers or is_constant:
            yield name


def gradients_of(recorded: Recorded) -> list[fx.Node]:
    """Calls of torch.autograd.grad in the forward."""
    return [site.node for site in recorded.sites if site.node.target is torch.autograd.grad]


def _differentiated(node: fx.Node, recording: Recording) -> list[fx.Node]:
    """A call of torch.autograd.grad, and what lies between its arguments."""
    outputs, inputs = (_nodes_in(node, place, name) for place, name in enumerate(("outputs", "inputs")))
    behind = _all_behind(outputs, recording)
    between = [
        candidate
        for candidate in behind
        if candidate not in inputs and not _all_behind([candidate], recording).isdisjoint(inputs)
    ]
    return [node, *between]


def _all_behind(nodes: Iterable[fx.Node], recording: Recording) -> set[fx.Node]:
    """What these follow from, also by what was written into their memory."""
    found: set[fx.Node] = set()
    left = [*nodes]
    while left:
        new = nodes_behind(left.pop()) - found
        found |= new
        memory = {memory_key for node in new for memory_key in recording.facts[node].memory}
        left += [changer for changed, _, changer in recording.mutations if changed in memory and changer not in found]
    return found


def _nodes_in(node: fx.Node, place: int, name: str) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(node.args[place] if len(node.args) > place else node.kwargs[name], found.append)
    return found


def _module_of(node: fx.Node) -> str:
    inside = [*node.meta.get("modules", []), *([str(node.target)] if node.op == "call_module" else [])]
    return inside[-1] if inside else ""


def _common(modules: Iterable[str]) -> str:
    """The module that all of these are in."""
    paths = [module.split(".") if module else [] for module in modules]
    out = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        out.append(parts[0])
    return ".".join(out)
