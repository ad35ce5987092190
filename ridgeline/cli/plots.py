"""How do figures become a picture? Charts with lines, written by matplotlib as SVG or PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ridgeline.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]
SUFFIXES = (".svg", ".png")
COLOURS = (  # told apart by the colour-blind too (Okabe and Ito)
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
)
PANEL_INCHES = 4.6, 3.0  # a chart's width and height
MAX_COLUMNS = 2
STYLE: dict[Any, Any] = {  # newer versions type the keys
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dedede",
    "legend.frameon": False,
    "savefig.dpi": 200,
    "svg.fonttype": "none",  # words stay words
    "svg.hashsalt": "ridgeline",  # the same figures give the same file
}


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: Sequence[Point]
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Chart:
    """`marks` are upright dashed lines: (x, words). On a logarithmic axis only y > 0 is drawn."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    y_log: bool = False
    marks: Sequence[tuple[float, str]] = ()


def check_plot(path: Path) -> None:
    """Raises ConfigError for a picture that cannot be made, before the figures are computed."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"{path}: a plot's name ends in {' or '.join(SUFFIXES)}")
    if find_spec("matplotlib") is None:
        raise ConfigError(
            "--plot needs the package matplotlib: pip install 'ridgeline[plots]', or leave it out"
        )


def save(path: Path, title: str, charts: Sequence[Chart]) -> None:
    """Write the charts beside each other as one picture. Raises ConfigError."""
    check_plot(path)
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    columns = min(MAX_COLUMNS, len(charts))
    rows = -(-len(charts) // columns)
    kind = path.suffix.lower()[1:]
    with rc_context(STYLE):
        width, height = PANEL_INCHES
        figure = Figure((columns * width, rows * height), layout="constrained")
        figure.suptitle(title, x=0.01, horizontalalignment="left", fontsize=10)
        for index, chart in enumerate(charts):
            _draw(figure.add_subplot(rows, columns, index + 1), chart)
        try:
            figure.savefig(path, format=kind, metadata={"Date": None} if kind == "svg" else None)
        except OSError as problem:
            reason = f"the plot cannot be written ({problem.strerror})"
            raise ConfigError(f"{path}: {reason}") from None


def _draw(axes: Axes, chart: Chart) -> None:
    axes.set_title(chart.title)
    axes.set_xlabel(chart.x_label)
    axes.set_ylabel(chart.y_label)
    for index, series in enumerate(chart.series):
        shown = [p for p in series.points if math.isfinite(p[1]) and (p[1] > 0 or not chart.y_log)]
        axes.plot(
            [x for x, _ in shown],
            [y for _, y in shown],
            linestyle="--" if series.dashed else "-",
            marker="o" if series.dots else "",
            markersize=3,
            linewidth=1.4,
            color=COLOURS[index % len(COLOURS)],
            label=series.name,
        )
    if chart.y_log:
        axes.set_yscale("log")
    elif all(y >= 0 for series in chart.series for _, y in series.points):
        axes.set_ylim(bottom=0.0)
    for x, words in chart.marks:
        axes.axvline(x, color="#282828", linestyle="--", linewidth=1)
        place = (x, 0.03)  # x in the data's unit, y as a share of the axis
        axes.text(*place, words, rotation=90, ha="right", transform=axes.get_xaxis_transform())
    if len(chart.series) > 1:
        axes.legend(loc="best")
