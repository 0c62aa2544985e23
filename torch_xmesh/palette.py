"""One color for each thing that pictures show, the same in all of them, told apart by color-blind readers too; and a
figure to draw in."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ACTIONS = {
    "F": ("forward", "#4477aa"),
    "B": ("backward", "#228833"),
    "I": ("input gradient", "#5fc77e"),
    "W": ("weight gradient", "#b5d33d"),
    "wait": ("waiting for a value", "#d3d3d3"),
    "before": ("before the first action", "#f0d9a8"),
    "between": ("between actions", "#7a7a7a"),
    "drain": ("until it has left", "#b79fd6"),
    "gradients": ("gradients, summed over data shards", "#aa3377"),
    "tied": ("gradients of tied parameters", "#4b1d63"),
    "losses": ("losses", "#ee8833"),
    "buffers": ("buffers", "#44bbdd"),
    "schedule": ("choice of a schedule", "#8a5a2b"),
    "send": ("sent", "#c9a514"),
    "receive": ("received", "#ee6677"),
    "idle": ("idle", "#ffffff"),
}
"""By kind of action: what it is called, and its color. White, the ground, is what nothing was done in."""

METHODS = {
    "auto": "#004d40",
    "striped": "#228833",
    "broadcast": "#4477aa",
    "send_recv": "#aa3377",
    "local_allgather": "#66ccee",
    "global_allgather": "#99ddff",
    "alpa": "#ccbb44",
    "torch_p2p": "#777777",
    "torch_broadcast": "#bbbbbb",
    "gloo": "#777777",
    "gloo_control": "#bbbbbb",
    "xmesh": "#004d40",
    "xmesh_cpp": "#44aa88",
    "torch_1f1b": "#777777",
    "torch_zb1p": "#444444",
    "by_hand": "#777777",
    "1f1b": "#88ccee",
    "eager_1f1b": "#999933",
    "interleaved_1f1b": "#ee8866",
    "zb_h1": "#aa3377",
    "eager_split": "#ee6677",
    "auto_held": "#55aa99",
}
"""Colors of strategies, of schedules, and of what both are compared with."""

_UNITS = ((1.0, "s"), (1e3, "ms"), (1e6, "us"))

_OTHERS = ("#332288", "#882255", "#999933", "#cc6677", "#44aa99", "#117733", "#aa4499", "#88ccee")


def colors_of(methods: list[str]) -> list[str]:
    """A color for each, those with options of their own ("broadcast:size+dfs") apart from each other."""
    colors: list[str] = []
    for method in methods:
        others = (color for color in _OTHERS if color not in colors)
        colors.append(METHODS[method] if method in METHODS else next(others, "#cccccc"))
    return colors


def ink_on(color: str) -> str:
    """The color, black or white, in which text can be read on this one ("#rrggbb")."""
    red, green, blue = (int(color[at : at + 2], 16) for at in (1, 3, 5))
    return "black" if 299 * red + 587 * green + 114 * blue > 150_000 else "white"


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit in which so long a time is drawn, and how many of it a second has."""
    return next((one for one in _UNITS if seconds * one[0] >= 1), _UNITS[-1])


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure, in inches, that is only saved: the user's matplotlib backend and figures stay as they are.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure
