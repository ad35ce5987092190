"""An 8B on an H200 with a 1B that drafts for it, priced, for tests of how many drafts pay."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.architectures.spec import ModelSpec
from ridgeline.cost.constants import default_calibration
from ridgeline.cost.hardware import find_device
from ridgeline.cost.pricer import Pricer
from ridgeline.cost.setup import Precision, Setup
from ridgeline.speculation.price import Drafter, DraftPrices, DraftSteps
from tests.cost.known_models import LLAMA_3_1B, LLAMA_3_8B

MAX_TOKENS = 512  # of a step that checks drafts, all of them captured


def h200(spec: ModelSpec) -> Pricer:
    device = find_device("h200-sxm")
    constants = default_calibration(device)
    host = replace(constants.host, captured_tokens=MAX_TOKENS)
    return Pricer(
        Setup(
            spec,
            device,
            precision=Precision.named("bf16"),
            calibration=replace(constants, host=host),
        )
    )


PLAIN = h200(LLAMA_3_8B)
DRAFTED = DraftPrices(PLAIN, DraftSteps(h200(LLAMA_3_1B)))
AT_HAND = DraftPrices(PLAIN, Drafter())
