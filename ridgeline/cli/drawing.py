"""How do lines and words become a picture? Two canvases, SVG text and PNG pixels, no library."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ridgeline.cli.strokes import ADVANCE, HEIGHT, strokes

Point = tuple[float, float]
Colour = tuple[int, int, int]
Anchor = Literal["start", "middle", "end"]
FONT = "system-ui, sans-serif"
DASH = 6.0


class Canvas(Protocol):
    """x to the right and y down, in pixels."""

    def line(
        self, points: Sequence[Point], colour: Colour, width: float = 1.0, *, dashed: bool = False
    ) -> None: ...

    def dot(self, point: Point, colour: Colour, radius: float) -> None: ...

    def text(
        self,
        point: Point,
        text: str,
        colour: Colour,
        size: float,
        anchor: Anchor = "start",
        *,
        upward: bool = False,
    ) -> None:
        """`size` is the height of a capital; `point` is on the baseline. `upward`: turned left."""
        ...

    def encode(self) -> bytes:
        """The picture as the content of a file."""
        ...


# ---------------------------------------------------------------------- SVG


class SvgCanvas:
    def __init__(self, width: int, height: int) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" font-family="{FONT}">',
            f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        ]

    def line(
        self, points: Sequence[Point], colour: Colour, width: float = 1.0, *, dashed: bool = False
    ) -> None:
        places = " ".join(f"{x:.2f},{y:.2f}" for x, y in points)
        dashes = f' stroke-dasharray="{DASH:g}"' if dashed else ""
        self._parts.append(
            f'<polyline points="{places}" fill="none" stroke="{_hex(colour)}" '
            f'stroke-width="{width:g}" stroke-linejoin="round" stroke-linecap="round"{dashes}/>'
        )

    def dot(self, point: Point, colour: Colour, radius: float) -> None:
        self._parts.append(
            f'<circle cx="{point[0]:.2f}" cy="{point[1]:.2f}" r="{radius:g}" '
            f'fill="{_hex(colour)}"/>'
        )

    def text(
        self,
        point: Point,
        text: str,
        colour: Colour,
        size: float,
        anchor: Anchor = "start",
        *,
        upward: bool = False,
    ) -> None:
        x, y = point
        turn = f' transform="rotate(-90 {x:.2f} {y:.2f})"' if upward else ""
        self._parts.append(
            f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size / 0.72:.1f}" fill="{_hex(colour)}" '
            f'text-anchor="{anchor}"{turn}>{escape(text)}</text>'
        )

    def encode(self) -> bytes:
        return "\n".join([*self._parts, "</svg>", ""]).encode()


def _hex(colour: Colour) -> str:
    return "#{:02x}{:02x}{:02x}".format(*colour)


# ---------------------------------------------------------------------- PNG


class PngCanvas:
    """Draws with soft edges: a pixel is covered as far as the stroke's edge lies beyond it.

    `scale` pixels stand for one unit, so that small words stay sharp.
    """

    def __init__(self, width: int, height: int, scale: int = 2) -> None:
        self.scale = scale
        self._pixels: NDArray[np.float32] = np.full(
            (height * scale, width * scale, 3), 255.0, dtype=np.float32
        )

    def line(
        self, points: Sequence[Point], colour: Colour, width: float = 1.0, *, dashed: bool = False
    ) -> None:
        for a, b in _dashes(points) if dashed else pairwise(points):
            self._stroke(a, b, colour, width)

    def dot(self, point: Point, colour: Colour, radius: float) -> None:
        self._stroke(point, point, colour, 2 * radius)

    def text(
        self,
        point: Point,
        text: str,
        colour: Colour,
        size: float,
        anchor: Anchor = "start",
        *,
        upward: bool = False,
    ) -> None:
        unit = size / HEIGHT
        length = max(0, len(text) * ADVANCE - 2) * unit
        begin = {"start": 0.0, "middle": -length / 2, "end": -length}[anchor]
        for index, letter in enumerate(text):
            for stroke in strokes(letter):
                places = [
                    (begin + (index * ADVANCE + x) * unit, (y - HEIGHT) * unit) for x, y in stroke
                ]
                turned = [(y, -x) if upward else (x, y) for x, y in places]
                self.line([(point[0] + x, point[1] + y) for x, y in turned], colour, size / 7)

    def encode(self) -> bytes:
        rows, columns, _ = self._pixels.shape
        pixels = np.clip(np.rint(self._pixels), 0, 255).astype(np.uint8)
        lines = np.zeros((rows, 1 + columns * 3), dtype=np.uint8)  # each begins with "no filter"
        lines[:, 1:] = pixels.reshape(rows, -1)
        head = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
        return b"".join(
            (
                b"\x89PNG\r\n\x1a\n",
                _chunk(b"IHDR", head),
                _chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)),
                _chunk(b"IEND", b""),
            )
        )

    def _stroke(self, a: Point, b: Point, colour: Colour, width: float) -> None:
        """Blend the pixels within width / 2 of the segment from a to b, round at its ends."""
        (ax, ay), (bx, by) = ((x * self.scale, y * self.scale) for x, y in (a, b))
        reach = width * self.scale / 2
        rows, columns, _ = self._pixels.shape
        left, right = _range(min(ax, bx) - reach, max(ax, bx) + reach, columns)
        top, bottom = _range(min(ay, by) - reach, max(ay, by) + reach, rows)
        if left >= right or top >= bottom:
            return
        x = np.arange(left, right, dtype=np.float32)[None, :] + 0.5 - ax
        y = np.arange(top, bottom, dtype=np.float32)[:, None] + 0.5 - ay
        dx, dy = bx - ax, by - ay
        length = dx * dx + dy * dy
        along = np.clip((x * dx + y * dy) / length, 0.0, 1.0) if length else 0.0 * (x + y)
        distance = np.hypot(x - along * dx, y - along * dy)
        cover = np.clip(reach + 0.5 - distance, 0.0, 1.0)[:, :, None]
        here = self._pixels[top:bottom, left:right]
        here += cover * (np.array(colour, dtype=np.float32) - here)


def _range(low: float, high: float, size: int) -> tuple[int, int]:
    return max(0, int(low) - 1), min(size, int(high) + 2)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _dashes(points: Sequence[Point]) -> Iterable[tuple[Point, Point]]:
    """The drawn pieces of a dashed polyline: DASH pixels each, as many left out between them."""
    walked = 0.0  # since the last dash began
    for (ax, ay), (bx, by) in pairwise(points):
        length = float(np.hypot(bx - ax, by - ay))
        done = 0.0
        while done < length:
            is_drawn = walked < DASH
            piece = min(length - done, (DASH if is_drawn else 2 * DASH) - walked)
            first, last = (t / length for t in (done, done + piece))
            if is_drawn:
                yield (
                    (ax + first * (bx - ax), ay + first * (by - ay)),
                    (ax + last * (bx - ax), ay + last * (by - ay)),
                )
            done, walked = done + piece, walked + piece
            if walked >= 2 * DASH - 1e-9:
                walked = 0.0
