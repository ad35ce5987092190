"""`ridgeline plan`: which machine, how many, and with which settings, for this traffic?"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from ridgeline.cli.engine_flags import add_model
from ridgeline.cli.machine_flags import THIS
from ridgeline.cli.parser import Parser
from ridgeline.cli.session import stage
from ridgeline.cli.values import above_zero, positive, time_span
from ridgeline.errors import ConfigError

if TYPE_CHECKING:
    from ridgeline.cli.described import Described
    from ridgeline.cost.constants import Calibration
    from ridgeline.cost.hardware import Device
    from ridgeline.planner.question import Offer, Question

EXAMPLES = """Nothing is run and no weights are needed. Every device, format and limit is priced in
closed form, the best are simulated with the real scheduler, and the answer is the `ridgeline serve`
command to type. Prices are bands with dates from the catalogue; --price replaces one.
A time is written as 200ms or 1.5s; a bare number is milliseconds.

examples:
  ridgeline plan llama-3.1-8b --rate 10 --input 500 --output 200 --ttft 1s --tpot 50ms
  ridgeline plan user/model --users 200 --think 20s --input 1000 --output 300 --ttft 1s --tpot 40ms
  ridgeline plan user/model --rate 10 --input 500 --output 200 --ttft 1s --tpot 50ms \\
      --devices l4,l40s,h100-sxm --price h100-sxm=2.1 --budget 12
  ridgeline plan user/model --rate 10 --input 500 --output 200 --ttft 1s --tpot 50ms --all

The exit code is 1 where nothing that this version serves keeps the promise.
"""
EXIT_NOTHING = 1


def add_arguments(parser: Parser) -> None:
    add_model(parser, takes_names=True)
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument("--rate", type=above_zero, metavar="R", help="requests a second")
    traffic.add_argument(
        "--users", type=above_zero, metavar="N", help="or people, who ask again after each answer"
    )
    traffic.add_argument(
        "--think", type=time_span, metavar="T", help="after so long (default: at once)"
    )
    traffic.add_argument("--input", type=positive, required=True, metavar="I", help="prompt tokens")
    traffic.add_argument(
        "--output", type=positive, required=True, metavar="O", help="answer tokens"
    )
    promise = parser.add_argument_group("promise")
    promise.add_argument(
        "--ttft", type=time_span, required=True, metavar="T", help="time to the first token"
    )
    promise.add_argument(
        "--tpot", type=time_span, required=True, metavar="T", help="time per token after it"
    )
    means = parser.add_argument_group("means")
    means.add_argument(
        "--devices",
        metavar="A,B",
        help="names of the catalogue, device files (.json) or this; default: all of the catalogue",
    )
    means.add_argument(
        "--price",
        action="append",
        default=[],
        metavar="DEVICE=USD",
        help="of one device for an hour; may be repeated",
    )
    means.add_argument("--budget", type=above_zero, metavar="USD", help="for all of it, per hour")
    means.add_argument(
        "--all", action="store_true", help="also show what this version cannot serve yet"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals (default: 0)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("-q", "--quiet", action="store_true", help="no progress")


def run(args: argparse.Namespace) -> int:
    from random import Random

    from ridgeline.cli.described import describe
    from ridgeline.cli.plan_tables import as_json, show
    from ridgeline.planner.plan import plan

    question = make_question(args, describe(args.model))
    with stage(args, f"comparing {len(question.offers)} devices"):
        found = plan(question, lambda: Random(args.seed))
    if args.json:
        print(json.dumps(as_json(found), indent=2))
    else:
        show(found)
    return 0 if found.winner is not None else EXIT_NOTHING


def make_question(args: argparse.Namespace, model: Described) -> Question:
    """What the command line asks. Of a model that this version does not serve all is looked at, as
    with --all. Raises ConfigError."""
    from ridgeline.architectures.spec import missing
    from ridgeline.planner.question import Question

    return Question(
        # The command to type needs a name under which there are weights.
        model=args.model if model.entry is None else model.entry.hub_id,
        spec=model.spec,
        rate=_rate(args),
        num_input=args.input,
        num_output=args.output,
        ttft_s=args.ttft,
        tpot_s=args.tpot,
        offers=_offers(args),
        budget=args.budget,
        include_unserved=args.all or bool(missing(model.spec)),
    )


def _rate(args: argparse.Namespace) -> float:
    from ridgeline.cost.laws import request_seconds
    from ridgeline.planner.question import rate_of_users

    if (args.rate is None) == (args.users is None):
        raise ConfigError("give either --rate or --users")
    if args.rate is not None:
        if args.think is not None:
            raise ConfigError("--think is for --users; leave it out, or give --users for --rate")
        return float(args.rate)
    promised_s = request_seconds(args.ttft, args.tpot, args.output)
    return rate_of_users(args.users, args.think or 0.0, promised_s)


def _offers(args: argparse.Namespace) -> tuple[Offer, ...]:
    """The devices to choose from, each at its price."""
    from ridgeline.cost.hardware import catalogue
    from ridgeline.planner.question import offer

    names = list(catalogue()) if args.devices is None else _names(args.devices)
    prices = dict(_price(text) for text in args.price)
    offers = []
    for name in names:
        device, record = _device(name)
        typed = prices.pop(name, None) if name in prices else prices.get(device.name)
        offers.append(offer(device, typed, record))
    known = {one.device.name for one in offers}
    if unknown := sorted(prices.keys() - known):
        raise ConfigError(f"--price {unknown[0]}: this device is not among those to choose from")
    return tuple(offers)


def _names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("--devices names no device")
    return list(dict.fromkeys(names))


def _price(text: str) -> tuple[str, float]:
    """(device, dollars) of "h100-sxm=2.5"."""
    name, _, dollars = text.partition("=")
    try:
        return name.strip(), float(dollars)
    except ValueError:
        raise ConfigError(f"--price {text!r}: write DEVICE=DOLLARS such as h100-sxm=2.5") from None


def _device(name: str) -> tuple[Device, Calibration | None]:
    """With the calibration that was made on such a device here, if any."""
    from ridgeline.cli.machine import open_device
    from ridgeline.records import find_calibration

    device, record = open_device(name)
    is_known = record is not None or name == THIS or name.endswith(".json")
    return device, record if is_known else find_calibration(device.name)
