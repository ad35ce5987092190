"""Which flags name a machine, and how a model is spread and stored on it? For commands
that price; loads nothing."""

from __future__ import annotations

from pathlib import Path

from ridgeline.cli.parser import Parser
from ridgeline.cli.values import number, positive

THIS = "this"
NUMBER_FORMATS = ("bf16", "fp16", "fp32", "fp8", "int8", "int4")


def add_machine_flags(parser: Parser) -> None:
    """--device, how the model is spread and stored, and what a device costs."""
    group = parser.add_argument_group("machine")
    group.add_argument(
        "--device",
        default=THIS,
        metavar="D",
        help="a name of the catalogue such as h100-sxm, a device file (.json), or this: the "
        "machine you are on (default: %(default)s)",
    )
    for name, what in (
        ("tp", "devices that split every layer"),
        ("pp", "stages that split the layers"),
        ("ep", "of the tp devices, those that divide the experts"),
    ):
        group.add_argument(f"--{name}", type=positive, default=1, metavar="N", help=what)
    group.add_argument(
        "--weights", choices=NUMBER_FORMATS, help="number format of weights (the checkpoint's own)"
    )
    group.add_argument(
        "--kv", choices=("auto", *NUMBER_FORMATS), default="auto", help="and of the KV cache"
    )
    parser.mark_expert("--pp", "--ep")
    group.add_argument("--calibration", type=Path, metavar="FILE", help="of ridgeline calibrate")
    group.add_argument(
        "--price",
        type=number(0),
        metavar="USD",
        help="of one device for an hour, not the catalogue's",
    )
