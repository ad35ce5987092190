"""Does what crosses between the processes arrive as it was sent, and nothing else?"""

from __future__ import annotations

import msgspec
import pytest
from msgspec import structs

from ridgeline.config import EngineConfig
from ridgeline.frames import BrokenWire, frame, frame_length
from ridgeline.request import (
    MAX_STOP_TOKEN_IDS,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from ridgeline.server import wire
from ridgeline.server.wire import (
    pack_add,
    read_command,
    read_event,
    unpack_add,
)

FULL = SamplingParams(
    max_tokens=7, min_tokens=1, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1,
    repetition_penalty=1.1, presence_penalty=-0.5, frequency_penalty=0.5,
    logit_bias={5: 1.0, 2: -1}, seed=-3, stop=("a", "b"), stop_token_ids=(9, 4),
    ignore_eos=True, n=2, best_of=3, logprobs=4,
    prompt_logprobs=2, length_penalty=0.5, early_stopping=True, skip_special_tokens=False,
)  # fmt: skip


def test_every_field_of_sampling_crosses() -> None:
    """What is resolved may have more stop tokens than a caller may give."""
    resolved = SamplingParams(stop_token_ids=range(MAX_STOP_TOKEN_IDS)).resolved(9, 0, [5000])
    beams = SamplingParams(beam_width=3, max_tokens=None)
    different = [
        name
        for name in SamplingParams.__struct_fields__
        if getattr(FULL, name) != getattr(SamplingParams(), name)
    ]
    apart = {"beam_width", "structured_outputs"}
    assert set(different) == set(SamplingParams.__struct_fields__) - apart
    held = SamplingParams(structured_outputs={"choice": ["a", "b"]})
    for sampling in (FULL, SamplingParams(), beams, held, resolved):
        request = Request("a", (1,), sampling, 0.0)
        (back,) = unpack_add(read_command(frame(pack_add(1, [request], 2.0))[4:]), 3.0)  # type: ignore[arg-type]
        assert back.sampling == sampling


def test_sampling_out_of_bounds_does_not_cross() -> None:
    wrong = structs.replace(SamplingParams(), n=99)
    with pytest.raises(BrokenWire, match=r"<= 8 - at `\$\[3\]\[0\]\[2\]\.n`"):
        read_command(frame(pack_add(1, [Request("a", (1,), wrong, 0.0)], 2.0))[4:])


def test_every_field_of_an_output_crosses() -> None:
    entry = TokenLogprobs(3, -0.5, 1, ((3, -0.5), (4, -1.5)))
    output = RequestOutput(
        "a", (1, 2), FinishReason.ERROR, (entry,), (entry, entry), 16, "why",
        (((1, 2), -3.0, (entry,)),), 3, 4,
    )  # fmt: skip
    assert read_event(frame(wire.Step((), (), (output,), wire.Gauges()))[4:]) == wire.Step(
        (), (), (output,), wire.Gauges()
    )


def test_requests_cross_with_their_prompt_once() -> None:
    parent = Request("q-0", (1, 2, 3), FULL, 1.0, priority=4, cache_salt=b"salt")
    child = Request(
        "q-1", (1, 2, 3), SamplingParams(seed=8), 1.0, priority=4, cache_salt=b"salt", fork_of="q-0"
    )
    add = pack_add(11, [parent, child], 2.0)
    assert len(add.prompts) == 1
    back = unpack_add(read_command(frame(add)[4:]), 9.5)  # type: ignore[arg-type]
    for sent, got in zip((parent, child), back, strict=True):
        for name in ("request_id", "prompt_token_ids", "sampling", "priority", "cache_salt"):
            assert getattr(sent, name) == getattr(got, name)
        assert got.fork_of == sent.fork_of
        assert got.arrival_time == 2.0  # at the engine
    (late, _) = unpack_add(add, 0.5)
    assert late.arrival_time == 0.5  # nobody arrives in the future


def test_start_carries_the_whole_configuration() -> None:
    config = EngineConfig(model="m", num_blocks=3, prefix_caching=False, max_model_len=8)
    message = wire.Start(config, "INFO")
    assert read_command(frame(message)[4:]) == message


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(["nonsense", 1]),
        msgspec.msgpack.encode(["add", 1]),
        msgspec.msgpack.encode(["abort", [1, 2]]),
        msgspec.msgpack.encode({"type": "abort"}),
        msgspec.msgpack.encode(["abort", ["a"]]) + b"\x00",
        msgspec.msgpack.encode(msgspec.msgpack.Ext(1, b"code")),
    ],
)
def test_anything_else_is_refused(payload: bytes) -> None:
    with pytest.raises(BrokenWire):
        read_command(payload)
    with pytest.raises(BrokenWire):
        read_event(payload)


def test_a_length_beyond_belief_is_refused() -> None:
    assert frame_length(b"\x10\x00\x00\x00") == 16
    with pytest.raises(BrokenWire):
        frame_length(b"\xff\xff\xff\xff")
