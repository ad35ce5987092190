"""`ridgeline predict`: how fast would this model be on that machine, and what would bind it?"""

from __future__ import annotations

import argparse

from ridgeline.cli.flags import add_model
from ridgeline.cli.machine import THIS, add_machine_flags
from ridgeline.cli.parser import Parser
from ridgeline.cli.session import stage
from ridgeline.cli.tables import answer
from ridgeline.cli.values import positive, share

EXAMPLES = """Nothing is run: the operators of a step are priced one by one. B requests are in
flight all the time, each that ends is replaced. A folder with config.json is enough, or the name of
a public model.

examples:
  ridgeline predict llama-3.1-8b --device h100-sxm
  ridgeline predict user/model --device h100-sxm --tp 8 --weights fp8 --batch 64 \\
      --input 1000 --output 500
  ridgeline predict path/to/model --device this --json
  ridgeline predict user/model --device m3-ultra --weights int4 --kv int8
"""


def add_arguments(parser: Parser) -> None:
    add_model(parser, takes_names=True)
    add_machine_flags(parser)
    group = parser.add_argument_group("load")
    group.add_argument("--batch", type=positive, default=1, metavar="B", help="requests in flight")
    group.add_argument("--input", type=positive, metavar="I", help="prompt tokens of each (512)")
    group.add_argument("--output", type=positive, metavar="O", help="answer tokens of each (128)")
    group.add_argument(
        "--max-num-batched-tokens",
        type=positive,
        metavar="N",
        help="most tokens computed in one step",
    )
    group.add_argument(
        "--memory-utilization", type=share, default=0.9, metavar="SHARE", help="of the device"
    )
    parser.mark_expert("--max-num-batched-tokens", "--memory-utilization")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    from ridgeline.cli.prediction import as_json, predict, shown

    with stage(args, "measuring this machine" if args.device == THIS else "pricing"):
        prediction = predict(args)
    answer(args, lambda: as_json(prediction), lambda: shown(prediction))
    return 0
