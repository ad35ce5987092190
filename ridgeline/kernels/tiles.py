"""Which way of cutting a small linear layer was measured to be the fastest on this device?

`tiles.json` beside this file holds the answers. It is a list "entries" of objects, one a line:

    device   the name that the driver gives, such as "NVIDIA H200"
    dtype    of W, such as "bfloat16"; x has the same, but for up to 8 rows beside "float8_e4m3fn"
             or "int8"; beside "int4" (groups of 128; see `int4_linear`) it has 16 bits
    outputs  rows of W; inputs: its columns
    rows     the bucket of rows of x: a power of two, which stands for all numbers above the one
             before it
    kind     "plain", or of "norm", "gated" and "residual" those that apply, joined by "+"
    tile     the fields of `Tile` that differ from their defaults; null where the library's product
             and the kernels it then needs beside it were faster
    others   (us, tb_per_s, library_us) say what was measured and are not read

What has no entry is done as `kernels.untuned_tiles` says, or for e4m3 and int8 as
`kernels.fp8_linear` and `kernels.int8_linear` guess, or by the library. A bias has no part in the
choice. An entry changes the order of additions and nothing else; but beside e4m3 it decides how x
is rounded too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from importlib.resources import files

from ridgeline.errors import ConfigError

MAX_ROWS = 64  # of the kernels in Triton
MAX_TILED = 512  # of those that the table knows
FILE = "tiles.json"


@dataclass(frozen=True, slots=True)
class Tile:
    """How the work of one launch is cut.

    A program takes `block_n` rows of W and goes over K in steps of `block_k`. K is cut into
    `splits`, one program each; or, with `per_sm`, a fixed number of programs for each
    multiprocessor share all steps of all tiles evenly, wherever the cuts fall.
    `dot`: tensor cores, with the weights as the tall operand; else (one row only) each thread
    multiplies and adds. `least_rows`: fewer rows of x are padded to that for the tensor cores,
    which take 8 by older instructions than 16. `stages`: loads under way in shared memory; 1: in
    registers, one step ahead. `tma`: the copy engine loads the weights. `ahead`: steps of weights
    called into the L2 cache before the wait for the kernel before. `early`: the next kernel may
    be launched right after that wait, not only after the last step. Both matter only where `pdl`
    does, which is False for a kernel that takes no part in it even if the caller would.
    `block_m`: so many rows of x at a time, where they are many (0: all); for e4m3 only.
    `stream`: the CUDA kernel of `stream_linear`, which says what the other fields mean there;
    `wgmma`: that of `tile_linear`, the same. `cluster`: of programs that share loads, there only.
    For weights of "int4" `int4_linear_cuda` says all that.
    """

    block_n: int
    block_k: int
    splits: int = 1
    warps: int = 4
    stages: int = 3
    dot: bool = True
    least_rows: int = 16
    per_sm: int = 0
    tma: bool = False
    ahead: int = 1
    early: bool = True
    pdl: bool = True
    block_m: int = 0
    stream: bool = False
    wgmma: bool = False
    cluster: int = 1


@dataclass(frozen=True, slots=True)
class Place:
    """One row of the table; `rows` is a bucket."""

    device: str
    dtype: str
    outputs: int
    inputs: int
    rows: int
    kind: str


def bucket(rows: int) -> int:
    """The power of two that a number of rows is treated as."""
    return 1 << (rows - 1).bit_length()


def kind_of(*, norm: bool = False, gated: bool = False, residual: bool = False) -> str:
    said = [name for name, on in (("norm", norm), ("gated", gated), ("residual", residual)) if on]
    return "+".join(said) or "plain"


def find_tile(place: Place) -> Tile | None:
    """The tile of our own kernel, or None for the library's product."""
    return _table().get(place)


def own_products(device: str, dtype: str) -> tuple[tuple[int, int], ...]:
    """(outputs, inputs) of W for which a single row is multiplied by a kernel of our own."""
    found = {
        (place.outputs, place.inputs)
        for place, tile in _table().items()
        if (place.device, place.dtype, place.rows) == (device, dtype, 1) and tile is not None
    }
    return tuple(sorted(found))


def is_measured(place: Place) -> bool:
    """The table has an answer, be it ours or the library."""
    return place in _table()


def read_tiles(text: str, source: str = FILE) -> dict[Place, Tile | None]:
    """What a file in the format above says; ConfigError names a wrong entry."""
    try:
        entries = json.loads(text)["entries"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{source}: no table of tiles ({error!r}); restore the file") from error
    table: dict[Place, Tile | None] = {}
    for number, entry in enumerate(entries):
        try:
            table[_place(entry)] = None if entry["tile"] is None else Tile(**entry["tile"])
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"{source}: entry {number} is wrong ({error!r}); remove it"
            ) from error
    return table


def write_tiles(table: Mapping[Place, Tile | None], measured: Mapping[Place, str]) -> str:
    """The text of a file; `measured`: JSON members to add to an entry, such as '"us": 7.1'."""
    lines = []
    for place in sorted(table, key=lambda p: tuple(str(v).zfill(9) for v in _values(p))):
        tile = table[place]
        members = dict(zip(_names(Place), _values(place), strict=True))
        told = json.dumps({**members, "tile": None if tile is None else _changed(tile)})
        more = measured.get(place)
        lines.append(told if more is None else f"{told[:-1]}, {more}}}")
    return '{"entries": [\n' + ",\n".join(lines) + "\n]}\n"


@lru_cache(maxsize=1)
def _table() -> dict[Place, Tile | None]:
    return read_tiles(files("ridgeline.kernels").joinpath(FILE).read_text(encoding="utf-8"))


def _place(entry: Mapping[str, object]) -> Place:
    return Place(**{name: entry[name] for name in _names(Place)})  # type: ignore[arg-type]


def _names(kind: type[Place] | type[Tile]) -> list[str]:
    return [field.name for field in fields(kind)]


def _values(place: Place) -> list[object]:
    return [getattr(place, name) for name in _names(Place)]


def _changed(tile: Tile) -> dict[str, object]:
    """The fields that differ from their defaults; the first two have none."""
    return {
        field.name: getattr(tile, field.name)
        for field in fields(Tile)
        if getattr(tile, field.name) != field.default
    }
