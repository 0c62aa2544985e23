"""Writes docs/api.md from the docstrings of the public names: python scripts/api_docs.py"""

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch_xmesh as xm
from torch_xmesh import testing
from torch_xmesh.pipeline.schedule.choice import Candidate
from torch_xmesh.pipeline.schedule.simulation import ActionSpan, TransferSpan
from torch_xmesh.pipeline.state.training import PipelineScaler

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "api.md"
SECTIONS: dict[str, dict[str, Any]] = {
    "Meshes and specs": {f"xm.{name}": getattr(xm, name) for name in ("Mesh", "device_mesh", "stage_meshes", "Spec")},
    "Reshards": {f"xm.{name}": getattr(xm, name) for name in ("reshard", "reshard_many")},
    "Plans": {
        f"xm.{name}": getattr(xm, name) for name in ("plan_resharding", "ReshardingPlan", "Topology", "Broadcast")
    },
    "Pipelines": {
        "xm.PipelineEngine": xm.PipelineEngine,
        "xm.split_at": xm.split_at,
        "PipelineScaler": PipelineScaler,
        "xm.split_backward": xm.split_backward,
    },
    "Schedules and their simulation": {
        **{f"xm.{name}": getattr(xm, name) for name in ("Schedule", "StageCosts", "EdgeCosts", "Costs", "simulate")},
        "xm.Simulation": xm.Simulation,
        "ActionSpan": ActionSpan,
        "TransferSpan": TransferSpan,
        "xm.choose_schedule": xm.choose_schedule,
        "xm.ScheduleChoice": xm.ScheduleChoice,
        "Candidate": Candidate,
    },
    "Automatic plans": {
        **{f"xm.{name}": getattr(xm, name) for name in ("plan_parallel", "ParallelPlan", "Compute", "OperatorTimes")},
        **{f"xm.presets.{name}": getattr(xm.presets, name) for name in xm.presets.__all__},
    },
    "The backend": {"xm.Options": xm.Options, "xm.about": xm.about, "xm.About": xm.About},
    "Errors": {"xm.PeerError": xm.PeerError, "xm.StageError": xm.StageError},
    "Tests on real processes": {f"xm.testing.{name}": getattr(testing, name) for name in testing.__all__},
}
"""By section: how a name is written, and what it is. Without "xm." are those that calls return."""
MADE_BY_CALLS = {
    "About",
    "OperatorTimes",
    "ParallelPlan",
    "PipelineScaler",
    "RankError",
    "ReshardingPlan",
    "Schedule",
    "ScheduleChoice",
    "Simulation",
}
"""Classes that nobody calls: they have no signature here."""
INTERNAL = {"core", "describe", "from_core", "kind_of", "links", "of_operator", "to_core", "unchecked"}
"""Members through which the package's own layers talk."""
ALIASES = {
    "AnyMesh": "Mesh | DeviceMesh",
    "DEFAULT_AXIS": "'default'",
    "Edge": "tuple[int, int]",
    "InitFn": "Callable[[nn.Module], object]",
    "InitSync": "bool | str",
    "Placed": "tuple[Sequence[Placement], bool]",
    "Source": "DTensor | Spec",
}
_HEAD = """# API reference

Every public name, written by `python scripts/api_docs.py` from the docstrings. `xm` is `import torch_xmesh as xm`.
`xm.__version__` is the package's version. Words are those of the [glossary](glossary.md).
"""
_WIDTH = 150
_SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Threading):\s*(.*)$")
_TITLES = {"Args": "Arguments"}


def page() -> str:
    """All of docs/api.md."""
    lines = [_HEAD]
    for section, names in SECTIONS.items():
        lines += [f"- **[{section}](#{_anchor(section)})**: {', '.join(_linked(name) for name in names)}"]
    lines.append("")
    for section, names in SECTIONS.items():
        lines += [f"## {section}", ""]
        for name, thing in names.items():
            lines += _entry(name, thing)
    return "\n".join(lines).rstrip() + "\n"


def members(name: str, kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class of SECTIONS, by how they are written."""
    for member, value in vars(kind).items():
        is_shown = isinstance(value, property | classmethod | staticmethod) or inspect.isfunction(value)
        if is_shown and not member.startswith("_") and member not in INTERNAL:
            yield f"{name.rpartition('.')[2]}.{member}", value


def _entry(name: str, thing: Any) -> list[str]:
    lines = [f"### `{name}`", ""]
    if thing is xm.Options:
        return lines + _options()
    if not inspect.isclass(thing) or thing.__name__ not in MADE_BY_CALLS:
        lines += _signature(name, thing)
    lines += _markdown(thing)
    if inspect.isclass(thing):
        for written, member in members(name, thing):
            lines += [f"#### `{written}`", "", *_signature(written, member), *_markdown(member, written)]
    return lines


def _options() -> list[str]:
    """Options is C++; its stub has the types and the texts."""
    tree = ast.parse((ROOT / "torch_xmesh" / "_C.pyi").read_text())
    found = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "Options")
    lines = [
        "```py",
        "xm.Options(timeout: timedelta = ...)",
        "```",
        "",
        *_paragraph(ast.get_docstring(found) or ""),
        "",
    ]
    for field, text in zip(found.body, found.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            kind = ast.unparse(field.annotation)
            lines += _item(f"`{ast.unparse(field.target)}` (`{kind}`): {text.value.value}")
    return [*lines, ""]


# Signatures.


def _signature(name: str, thing: Any) -> list[str]:
    node = ast.parse(textwrap.dedent(inspect.getsource(_function(thing)))).body[0]
    if isinstance(node, ast.ClassDef):
        made = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
        parameters, result = _fields(node) if made is None else _parameters(made.args), ""
    else:
        assert isinstance(node, ast.FunctionDef)
        parameters = _parameters(node.args)
        result = "" if node.returns is None else f" -> {_type(node.returns)}"
        if isinstance(thing, property):
            return ["```py", f"{name}{result.replace(' ->', ':')}", "```", ""]
    text = f"{name}({', '.join(parameters)}){result}"
    if len(text) > 100:
        text = "\n".join([f"{name}(", *(f"    {one}," for one in parameters), f"){result}"])
    return ["```py", text, "```", ""]


def _function(thing: Any) -> Any:
    found: Any = thing.fget if isinstance(thing, property) else getattr(thing, "__func__", thing)
    return inspect.unwrap(found)


def _parameters(args: ast.arguments) -> list[str]:
    positional = [*args.posonlyargs, *args.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(args.defaults))
    lines = [_parameter(one, value) for one, value in zip(positional, [*defaults, *args.defaults], strict=True)]
    if positional and positional[0].arg in ("self", "cls"):
        del lines[0]
    if args.vararg is not None:
        lines.append("*" + _parameter(args.vararg, None))
    elif args.kwonlyargs:
        lines.append("*")
    lines += [_parameter(one, value) for one, value in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg is not None:
        lines.append("**" + _parameter(args.kwarg, None))
    return lines


def _parameter(one: ast.arg, default: ast.expr | None) -> str:
    kind = "" if one.annotation is None else f": {_type(one.annotation)}"
    return f"{one.arg}{kind}" + ("" if default is None else f" = {_text(default)}")


def _fields(node: ast.ClassDef) -> list[str]:
    """Of a dataclass or a named tuple."""
    is_keyword = any("kw_only=True" in ast.unparse(one) for one in node.decorator_list)
    lines = ["*"] if is_keyword else []
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and not ast.unparse(one.target).startswith("_"):
            value = "" if one.value is None else f" = {_text(one.value)}"
            lines.append(f"{ast.unparse(one.target)}: {_type(one.annotation)}{value}")
    return lines


def _type(node: ast.expr) -> str:
    is_quoted = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return _text(ast.parse(node.value, mode="eval").body if is_quoted else node)  # type: ignore[attr-defined]


def _text(node: ast.expr) -> str:
    return re.sub(r"\w+", lambda found: ALIASES.get(found[0], found[0]), ast.unparse(node))


# Docstrings.


def _markdown(thing: Any, written: str = "") -> list[str]:
    """A docstring: paragraphs, and under Args and the like a list."""
    text = inspect.getdoc(_function(thing) if not inspect.isclass(thing) else thing) or ""
    lines: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        head = _SECTION.match(block.splitlines()[0]) if block else None
        if head is None:
            lines += [*_paragraph(block, written), ""]
            continue
        body = textwrap.dedent("\n".join(block.splitlines()[1:]))
        title = _TITLES.get(head[1], head[1])
        entries = re.split(r"\n(?=\S)", body)
        if head[2] or not all(re.match(r"[\w*, ]+: ", entry) for entry in entries):
            lines += [*_paragraph(f"**{title}**: {head[2]} {body}", written), ""]
            continue
        lines += [f"**{title}**", ""]
        for entry in entries:
            names, _, rest = entry.partition(": ")
            lines += _item(f"`{names.replace(', ', '`, `')}`: {rest}", written)
        lines.append("")
    return lines


def _paragraph(text: str, written: str = "") -> list[str]:
    return _filled(_inline(text, written), "", "")


def _item(text: str, written: str = "") -> list[str]:
    return _filled(_inline(text, written), "- ", "  ")


def _inline(text: str, written: str) -> str:
    """Roles become links, double backticks single ones."""
    text = re.sub(r":\w+:`([^`]+)`", lambda found: _linked(found[1], written), text)
    return re.sub(r"``(.+?)``", r"`\1`", text, flags=re.DOTALL)


def _linked(target: str, written: str = "") -> str:
    """A link to a name of the page, `written` being where it stands; or the name, where the page has none."""
    owner = written.partition(".")[0]
    for name, thing in ((name, thing) for names in SECTIONS.values() for name, thing in names.items()):
        short = name.rpartition(".")[2]
        if target in (name, short):
            return f"[`{target}`](#{_anchor(name)})"
        if inspect.isclass(thing) and thing is not xm.Options:
            for member, _ in members(name, thing):
                if target == member or (owner in ("", short) and f"{short}.{target}" == member):
                    return f"[`{target}`](#{_anchor(member)})"
    return f"`{target}`"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _filled(text: str, first: str, later: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        _WIDTH,
        initial_indent=first,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )


def main(arguments: Sequence[str]) -> int:
    if arguments:
        print("usage: python scripts/api_docs.py")
        return 2
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
