"""Plots as files: SVG that parses, PNG that decodes, and ink where the data are."""

from __future__ import annotations

import struct
import zlib
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from numpy.typing import NDArray

from ridgeline.cli.drawing import PngCanvas
from ridgeline.cli.plots import COLOURS, Chart, Series, label, log_ticks, nice_ticks, save
from ridgeline.cli.strokes import strokes
from ridgeline.errors import ConfigError

RED = (255, 0, 0)
SVG = "{http://www.w3.org/2000/svg}"


def decoded(content: bytes) -> NDArray[np.uint8]:
    """The pixels of a PNG of ours: checks each chunk's sum on the way."""
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    at, chunks = 8, {}
    while at < len(content):
        (size,) = struct.unpack(">I", content[at : at + 4])
        body = content[at + 4 : at + 8 + size]
        (checksum,) = struct.unpack(">I", content[at + 8 + size : at + 12 + size])
        assert checksum == zlib.crc32(body)
        chunks[body[:4]] = body[4:]
        at += 12 + size
    width, height, depth, kind = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
    assert (depth, kind) == (8, 2)
    lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), dtype=np.uint8)
    lines = lines.reshape(height, 1 + 3 * width)
    assert not lines[:, 0].any()
    return lines[:, 1:].reshape(height, width, 3)


def ink(pixels: NDArray[np.uint8]) -> tuple[int, int, int, int]:
    """left, top, right, bottom of what is not white, in pixels."""
    rows, columns = np.nonzero((pixels < 250).any(axis=2))
    return int(columns.min()), int(rows.min()), int(columns.max()), int(rows.max())


def test_a_line_is_where_it_was_drawn() -> None:
    canvas = PngCanvas(40, 30, scale=1)
    canvas.line([(10, 5), (10, 20)], RED, width=2)
    pixels = decoded(canvas.encode())
    assert pixels.shape == (30, 40, 3)
    assert tuple(pixels[12, 10]) == RED
    assert tuple(pixels[12, 20]) == (255, 255, 255)
    left, top, right, bottom = ink(pixels)
    assert 8 <= left <= right <= 12
    assert 3 <= top <= 5
    assert 19 <= bottom <= 21


def test_lines_that_leave_the_picture_are_cut() -> None:
    canvas = PngCanvas(10, 10, scale=1)
    canvas.line([(-50, 5), (50, 5)], RED)
    canvas.line([(-50, -5), (50, -5)], RED)
    assert (decoded(canvas.encode())[5, :, 1] < 200).all()


def test_dashes_leave_gaps_also_in_short_pieces() -> None:
    canvas = PngCanvas(200, 10, scale=1)
    canvas.line([(x, 5.0) for x in range(0, 201, 2)], RED, dashed=True)
    row = decoded(canvas.encode())[5, :, 1] < 200
    turns = sum(a != b for a, b in pairwise(row.tolist()))
    assert 25 <= turns <= 40
    assert 0.3 < row.mean() < 0.7


def test_words_end_where_they_are_anchored() -> None:
    canvas = PngCanvas(100, 30, scale=1)
    canvas.text((90, 20), "HEH", (0, 0, 0), 10, "end")
    left, top, right, bottom = ink(decoded(canvas.encode()))
    assert 88 <= right <= 91
    assert 60 <= left <= 66
    assert (9 <= top <= 11, 18 <= bottom <= 21) == (True, True)


def test_words_can_be_turned() -> None:
    canvas = PngCanvas(40, 100, scale=1)
    canvas.text((20, 90), "HEH", (0, 0, 0), 10, upward=True)
    left, top, right, bottom = ink(decoded(canvas.encode()))
    assert right - left < bottom - top
    assert 88 <= bottom <= 91


def test_every_letter_of_our_words_has_strokes() -> None:
    box = strokes("\x00")
    for letter in "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:-+/%$()'<>=_":
        assert strokes(letter), letter
        assert strokes(letter) != box, letter
        assert all(0 <= x <= 4 and 0 <= y <= 8 for line in strokes(letter) for x, y in line)


def charts() -> list[Chart]:
    rising = Series("rising & up", [(0.0, 1.0), (10.0, 100.0)])
    other = Series("other", [(0.0, 10.0), (10.0, 10.0), (5.0, float("nan"))], dots=True)
    both = Chart("both <1>", "x", "y", [rising, other], y_log=True, marks=[(5.0, "here")])
    return [both, Chart("one", "x", "y", [rising]), Chart("none", "x", "y", [Series("n", [])])]


def test_svg_is_well_formed_and_has_the_words(tmp_path: Path) -> None:
    save(tmp_path / "a.svg", "all of it", charts())
    root = ElementTree.fromstring((tmp_path / "a.svg").read_text())
    words = [element.text for element in root.iter(f"{SVG}text")]
    for word in ("all of it", "both <1>", "rising & up", "other", "here", "100"):
        assert word in words
    lines = [element.get("points", "") for element in root.iter(f"{SVG}polyline")]
    places = [float(v) for points in lines for pair in points.split() for v in pair.split(",")]
    assert all(0 <= place <= 920 for place in places)
    assert len(list(root.iter(f"{SVG}circle"))) == 2


def test_png_shows_the_lines_in_their_colours(tmp_path: Path) -> None:
    save(tmp_path / "a.PNG", "t", charts())
    pixels = decoded((tmp_path / "a.PNG").read_bytes()).reshape(-1, 3)
    for colour in COLOURS[:2]:
        assert (pixels == np.array(colour)).all(axis=1).sum() > 50


def test_other_kinds_and_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.svg or \.png"):
        save(tmp_path / "a.jpg", "t", charts())
    with pytest.raises(ConfigError, match="cannot be written"):
        save(tmp_path / "no" / "a.svg", "t", charts())


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 7.3), (-3, 4), (100, 101), (5, 5), (0, 0), (1e-6, 3e-6)]
)
def test_ticks_enclose_and_are_round(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low + 1e-12
    assert ticks[-1] >= high - 1e-12
    assert 2 <= len(ticks) <= 9
    steps = {round((b - a) / (ticks[1] - ticks[0]), 6) for a, b in pairwise(ticks)}
    assert steps == {1.0}


def test_logarithmic_ticks() -> None:
    assert log_ticks(0.02, 3.0) == [0.01, 0.1, 1.0, 10.0]
    assert log_ticks(1.0, 1.0) == [1.0, 10.0]
    assert [label(v) for v in (0.01, 40, 1500, 3e6)] == ["0.01", "40", "1.5k", "3M"]
