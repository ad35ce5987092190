"""How do figures become a plot? Panels with axes and lines, written as SVG or PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ridgeline.cli.drawing import Canvas, Colour, PngCanvas, Point, SvgCanvas
from ridgeline.errors import ConfigError

FORMATS = {".svg": SvgCanvas, ".png": PngCanvas}
COLOURS: tuple[Colour, ...] = (  # told apart by the colour-blind too (Okabe and Ito)
    (0, 114, 178),
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (230, 159, 0),
    (86, 180, 233),
)
INK: Colour = (40, 40, 40)
FAINT: Colour = (222, 222, 222)
PANEL_WIDTH, PANEL_HEIGHT = 460, 300
LEFT, RIGHT, TOP, BOTTOM = 66, 26, 34, 44  # around the axes of a panel
TITLE = 28
SMALL, LARGE = 7.5, 9.0  # height of a capital
MAX_COLUMNS = 2
TICKS = 5


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


def check_name(path: Path) -> None:
    """Raises ConfigError for a plot of a kind that cannot be written."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"{path}: a plot's name ends in {' or '.join(FORMATS)}")


def save(path: Path, title: str, charts: Sequence[Chart]) -> None:
    """Write the charts beside each other as one picture. Raises ConfigError."""
    check_name(path)
    columns = min(MAX_COLUMNS, len(charts))
    rows = -(-len(charts) // columns)
    canvas: Canvas = FORMATS[path.suffix.lower()](
        columns * PANEL_WIDTH, rows * PANEL_HEIGHT + TITLE
    )
    canvas.text((12, 20), title, INK, LARGE)
    for index, chart in enumerate(charts):
        corner = (index % columns * PANEL_WIDTH, index // columns * PANEL_HEIGHT + TITLE)
        _Panel(canvas, chart, corner).draw()
    try:
        path.write_bytes(canvas.encode())
    except OSError as problem:
        raise ConfigError(f"{path}: the plot cannot be written ({problem.strerror})") from None


class _Panel:
    """One chart: its scales, and where its data are on the canvas."""

    def __init__(self, canvas: Canvas, chart: Chart, corner: Point) -> None:
        self.canvas, self.chart, self.corner = canvas, chart, corner
        self.series = [(s, [p for p in s.points if self._shows(p)]) for s in chart.series]
        xs = [x for _, points in self.series for x, _ in points] + [x for x, _ in chart.marks]
        ys = [y for _, points in self.series for _, y in points]
        self.x_ticks = nice_ticks(min(xs, default=0.0), max(xs, default=1.0))
        self.y_ticks = (
            log_ticks(min(ys, default=0.1), max(ys, default=1.0))
            if chart.y_log
            else nice_ticks(min(0.0, *ys) if ys else 0.0, max(ys, default=1.0))
        )

    def _shows(self, point: Point) -> bool:
        return math.isfinite(point[1]) and (point[1] > 0 or not self.chart.y_log)

    def _x(self, x: float) -> float:
        low, high = self.x_ticks[0], self.x_ticks[-1]
        wide = PANEL_WIDTH - LEFT - RIGHT
        return self.corner[0] + LEFT + (x - low) / (high - low) * wide

    def _y(self, y: float) -> float:
        low, high = self.y_ticks[0], self.y_ticks[-1]
        if self.chart.y_log:
            low, high, y = math.log10(low), math.log10(high), math.log10(y)
        tall = PANEL_HEIGHT - TOP - BOTTOM
        return self.corner[1] + TOP + (1 - (y - low) / (high - low)) * tall

    def draw(self) -> None:
        self._axes()
        self._words()
        for index, (series, points) in enumerate(self.series):
            colour = COLOURS[index % len(COLOURS)]
            places = [(self._x(x), self._y(y)) for x, y in points]
            self.canvas.line(places, colour, 1.6, dashed=series.dashed)
            for place in places if series.dots else ():
                self.canvas.dot(place, colour, 2.4)
        self._marks()
        self._legend()

    def _axes(self) -> None:
        left, right = self._x(self.x_ticks[0]), self._x(self.x_ticks[-1])
        bottom, top = self._y(self.y_ticks[0]), self._y(self.y_ticks[-1])
        for y in self.y_ticks:
            self.canvas.line([(left, self._y(y)), (right, self._y(y))], FAINT)
            self.canvas.text((left - 6, self._y(y) + 3), label(y), INK, SMALL, "end")
        for x in self.x_ticks:
            self.canvas.line([(self._x(x), bottom), (self._x(x), bottom + 4)], INK)
            self.canvas.text((self._x(x), bottom + 16), label(x), INK, SMALL, "middle")
        self.canvas.line([(left, top), (left, bottom), (right, bottom)], INK)

    def _words(self) -> None:
        x, y = self.corner
        middle = x + LEFT + (PANEL_WIDTH - LEFT - RIGHT) / 2
        self.canvas.text((x + LEFT, y + 14), self.chart.title, INK, LARGE)
        self.canvas.text((middle, y + PANEL_HEIGHT - 8), self.chart.x_label, INK, SMALL, "middle")
        upright = (x + 14, y + TOP + (PANEL_HEIGHT - TOP - BOTTOM) / 2)
        self.canvas.text(upright, self.chart.y_label, INK, SMALL, "middle", upward=True)

    def _marks(self) -> None:
        bottom, top = self._y(self.y_ticks[0]), self._y(self.y_ticks[-1])
        for x, words in self.chart.marks:
            self.canvas.line([(self._x(x), bottom), (self._x(x), top)], INK, dashed=True)
            self.canvas.text((self._x(x) - 4, bottom - 6), words, INK, SMALL, upward=True)

    def _legend(self) -> None:
        if len(self.series) < 2:
            return
        x, y = self.corner[0] + LEFT + 10, self.corner[1] + TOP + 4.0
        for index, (series, _) in enumerate(self.series):
            colour = COLOURS[index % len(COLOURS)]
            self.canvas.line([(x, y), (x + 16, y)], colour, 2, dashed=series.dashed)
            self.canvas.text((x + 22, y + 4), series.name, INK, SMALL)
            y += 14


def nice_ticks(low: float, high: float) -> list[float]:
    """Round numbers, evenly spaced, from at or below `low` to at or above `high`."""
    if high <= low:
        high = low + (abs(low) or 1.0)
    rough = (high - low) / TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * f for f in (1, 2, 2.5, 5, 10) if power * f >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [n * step for n in range(first, last + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten from at or below `low` to at or above `high`; both above 0."""
    first = math.floor(math.log10(low) + 1e-9)
    last = max(first + 1, math.ceil(math.log10(high) - 1e-9))
    return [10.0**n for n in range(first, last + 1)]


def label(value: float) -> str:
    """A tick in few letters: 0.25, 40, 1.5k, 3M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"
