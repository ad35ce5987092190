"""Plots as files: SVG that parses and has the words, PNG with ink in the colours of the lines."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from ridgeline.cli import plots
from ridgeline.cli.plots import COLOURS, Chart, Series, check_plot, save
from ridgeline.errors import ConfigError

SVG = "{http://www.w3.org/2000/svg}"


def charts() -> list[Chart]:
    rising = Series("rising & up", [(0.0, 1.0), (10.0, 100.0)])
    other = Series("other", [(0.0, 10.0), (10.0, 10.0), (5.0, float("nan"))], dots=True)
    both = Chart("both <1>", "x", "y", [rising, other], y_log=True, marks=[(5.0, "here")])
    return [both, Chart("one", "x", "y", [rising]), Chart("none", "x", "y", [Series("n", [])])]


def test_svg_is_well_formed_and_has_the_words(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        save(tmp_path / name, "all of it", charts())
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert text == (tmp_path / "b.svg").read_text(encoding="utf-8")
    words = [element.text for element in ElementTree.fromstring(text).iter(f"{SVG}text")]
    for word in ("all of it", "both <1>", "one", "none", "rising & up", "other", "here"):
        assert word in words
    for colour in COLOURS[:2]:
        assert colour in text


def test_png_shows_the_lines_in_their_colours(tmp_path: Path) -> None:
    from matplotlib.image import imread

    save(tmp_path / "a.PNG", "t", charts())
    pixels = np.rint(imread(tmp_path / "a.PNG")[:, :, :3] * 255).astype(int).reshape(-1, 3)
    for colour in COLOURS[:2]:
        wanted = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        assert (pixels == np.array(wanted)).all(axis=1).sum() > 50


def test_other_kinds_and_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"\.svg or \.png"):
        save(tmp_path / "a.jpg", "t", charts())
    with pytest.raises(ConfigError, match="cannot be written"):
        save(tmp_path / "no" / "a.svg", "t", charts())


def test_without_the_library_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"matplotlib: pip install 'ridgeline\[plots\]'"):
        check_plot(Path("a.svg"))
