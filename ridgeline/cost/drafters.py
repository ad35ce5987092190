"""What does it cost to make guesses, by each method that the engine knows?"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.architectures.spec import ModelSpec
from ridgeline.cost.precision import Precision
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import Setup
from ridgeline.cost.speculation import Drafter, DraftSteps, Free, GuessPrices, LookAhead
from ridgeline.errors import ConfigError
from ridgeline.formats import LAYERS, MODEL, AskedGuesses

CAUGHT_UP = 2  # tokens in a draft model's first pass: it has not seen its own last guess


def guess_prices(target: Pricer, asked: AskedGuesses, draft: ModelSpec | None) -> GuessPrices:
    """Of steps of the engine that `target` prices. `draft` is the model that guesses, if one
    does; ConfigError where it is lacking."""
    host = target.setup.constants.host
    return GuessPrices(
        target,
        drafter_of(target.setup, asked, draft),
        choice_s=host.choice_s if asked.num_guesses is None else 0.0,
        token_s=host.token_s,
        begin_s=host.begin_s,
    )


def drafter_of(setup: Setup, asked: AskedGuesses, draft: ModelSpec | None) -> Drafter:
    """For the model of `setup`, on the same devices and in the same dtype."""
    wanted = asked.line.argument
    if wanted == MODEL:
        if draft is None:
            raise ConfigError(
                f"the price of {asked.method} guesses needs the model that makes them"
            )
        plain = Precision(setup.precision.dtype, "plain", setup.precision.kv)
        return DraftSteps(Pricer(replace(setup, spec=draft, precision=plain)), begin=CAUGHT_UP)
    if wanted == LAYERS:
        return DraftSteps(
            Pricer(replace(setup, spec=first_layers(setup.spec, int(asked.argument))))
        )
    if asked.line.looks_ahead:
        return LookAhead(setup.constants.host.look_s)
    return Free()


def first_layers(spec: ModelSpec, num_layers: int) -> ModelSpec:
    """The model that ends after so many of its layers, with the same output matrix."""
    return replace(spec, layers=spec.layers[:num_layers])
