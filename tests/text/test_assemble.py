"""However the engine cuts its outputs, a user sees the same text, tokens and ending."""

from __future__ import annotations

import random
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from ridgeline.request import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from ridgeline.text.assemble import ChoiceDelta, SampleAssembler
from ridgeline.text.tokenizer import Tokenizer, TokenizerSettings

EOS, HIDDEN, PAIR = 256, 257, 258


def byte_tokenizer() -> Tokenizer:
    """One token a byte (id = byte), an end token, another special one, and "ab" as one token."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(alphabet) - {chr(byte) for byte in plain})
    missing = [byte for byte in range(256) if byte not in plain]
    vocab = {chr(byte): byte for byte in plain} | dict(zip(others, missing, strict=True))
    vocab |= {"<eos>": EOS, "<hidden>": HIDDEN, "ab": PAIR}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>", "<hidden>"])
    return Tokenizer(backend, TokenizerSettings({"eos_token": "<eos>"}))


TOKENIZER = byte_tokenizer()


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(text.encode())


def output(ids: tuple[int, ...], reason: FinishReason | None = None) -> RequestOutput:
    logprobs = tuple(TokenLogprobs(token_id, -0.5, 1) for token_id in ids)
    return RequestOutput("r", ids, reason, logprobs=logprobs)


def assembler(**options: Any) -> SampleAssembler:
    sampling = SamplingParams(**options).resolved(1000, 0, [EOS])
    return SampleAssembler(TOKENIZER, sampling, (1,), end_token_ids=[EOS])


def test_the_model_s_end_token_is_not_seen() -> None:
    sample = assembler()
    assert sample.push(output(ids_of("hi"))) == ChoiceDelta(
        0, "hi", ids_of("hi"), output(ids_of("hi")).logprobs
    )
    last = sample.push(output((EOS,), FinishReason.STOP))
    assert last == ChoiceDelta(0, "", (), (), "stop", None)
    assert (sample.text, sample.token_ids, sample.finish_reason) == (
        "hi",
        list(ids_of("hi")),
        "stop",
    )


def test_a_stop_token_of_the_user_s_is_the_reason() -> None:
    sample = assembler(stop_token_ids=[ord("!")])
    delta = sample.push(output(ids_of("hi!"), FinishReason.STOP))
    assert (delta.text, delta.token_ids) == ("hi", ids_of("hi"))
    assert len(delta.logprobs) == 2
    assert (delta.finish_reason, delta.stop_reason) == ("stop", ord("!"))


def test_an_ignored_end_token_is_an_ordinary_one() -> None:
    sample = assembler(ignore_eos=True, skip_special_tokens=False)
    sample.push(output((*ids_of("a"), EOS, *ids_of("b")), FinishReason.LENGTH))
    assert sample.text == "a<eos>b"
    assert sample.token_ids == [97, EOS, 98]
    assert sample.finish_reason == "length"


def test_special_tokens_are_hidden_unless_asked_for() -> None:
    hidden, shown = assembler(), assembler(skip_special_tokens=False)
    for sample in (hidden, shown):
        sample.push(output((97, HIDDEN, 98), FinishReason.LENGTH))
        assert sample.token_ids == [97, HIDDEN, 98]
    assert (hidden.text, shown.text) == ("ab", "a<hidden>b")


def test_a_stop_string_ends_the_text_before_it() -> None:
    sample = assembler(stop=["END"])
    first = sample.push(output(ids_of("some E")))
    assert first.text == "some "
    assert first.finish_reason is None
    last = sample.push(output(ids_of("ND and more")))
    assert (last.text, last.token_ids) == ("", ids_of("ND"))
    assert len(last.logprobs) == 2
    assert (last.finish_reason, last.stop_reason) == ("stop", "END")
    assert sample.text == "some "
    assert sample.token_ids == list(ids_of("some END"))
    assert sample.push(output(ids_of("x"), FinishReason.ABORT)) == ChoiceDelta(0)
    assert sample.text == "some "


def test_a_stop_string_inside_a_token_counts_that_token() -> None:
    sample = assembler(stop=["a"])
    delta = sample.push(output((*ids_of("x"), PAIR, *ids_of("y"))))
    assert (delta.text, delta.token_ids, delta.stop_reason) == ("x", (120, PAIR), "a")


def test_a_stop_string_wins_over_the_end_that_comes_with_it() -> None:
    for reason in (FinishReason.LENGTH, FinishReason.STOP):
        sample = assembler(stop=["b"])
        delta = sample.push(output((97, 98, EOS), reason))
        assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", "stop", "b")


def test_text_held_back_comes_out_at_the_end() -> None:
    sample = assembler(stop=["END"])
    assert sample.push(output(ids_of("the E"))).text == "the "
    assert sample.push(output(ids_of("N"), FinishReason.LENGTH)).text == "EN"
    assert (sample.text, sample.finish_reason) == ("the EN", "length")


def test_half_a_character_is_shown_only_at_the_end() -> None:
    sample = assembler()
    assert sample.push(output(ids_of("\u00e9")[:1])).text == ""
    assert sample.push(output((), FinishReason.LENGTH)).text == "\ufffd"


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_other_endings_keep_their_names(reason: FinishReason) -> None:
    sample = assembler(stop=["ab"])
    sample.push(output(ids_of("xa")))
    delta = sample.push(output((), reason))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", reason.value, None)


def test_the_first_min_tokens_are_not_searched() -> None:
    sample = assembler(stop=["b"], min_tokens=3)
    delta = sample.push(output(ids_of("abcdbx")))
    assert (delta.text, delta.stop_reason) == ("abcd", "b")
    assert delta.token_ids == ids_of("abcdb")


def test_without_a_tokenizer_there_are_ids_only() -> None:
    sampling = SamplingParams().resolved(9, 0, [EOS])
    sample = SampleAssembler(None, sampling, (1,), end_token_ids=[EOS])
    assert sample.push(output((5, 6))) == ChoiceDelta(0, "", (5, 6), output((5, 6)).logprobs)
    assert sample.push(output((7, EOS), FinishReason.STOP)).token_ids == (7,)
    assert (sample.text, sample.token_ids, sample.finish_reason) == ("", [5, 6, 7], "stop")


def test_outputs_without_log_probabilities() -> None:
    delta = assembler().push(RequestOutput("r", ids_of("ab")))
    assert delta.logprobs == ()


def test_any_cut_of_the_outputs_gives_the_same_answer() -> None:
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    vocabulary = [97, 98, 99, 0xC3, 0xA9, 0xE4, EOS, HIDDEN, PAIR]
    endings = set()
    for _ in range(400):
        ids = tuple(rng.choices(vocabulary, k=rng.randint(1, 15)))
        options: dict[str, Any] = {
            "stop": [
                "".join(rng.choices("abc", k=rng.randint(1, 3))) for _ in range(rng.randint(0, 3))
            ],
            "skip_special_tokens": rng.random() < 0.5,
            "min_tokens": rng.choice([0, 0, 2]),
        }
        if EOS in ids:
            ids = ids[: ids.index(EOS) + 1]
        reason = FinishReason.STOP if ids[-1] == EOS else FinishReason.LENGTH
        whole = assembler(**options)
        whole.push(output(ids, reason))
        pieces = assembler(**options)
        deltas = []
        at = 0
        while at < len(ids):
            step = min(rng.randint(0, 3), len(ids) - at)
            at += step
            deltas.append(
                pieces.push(output(ids[at - step : at], reason if at == len(ids) else None))
            )
        assert "".join(delta.text for delta in deltas) == pieces.text == whole.text
        assert (
            [i for delta in deltas for i in delta.token_ids] == pieces.token_ids == whole.token_ids
        )
        assert [e.token_id for d in deltas for e in d.logprobs] == pieces.token_ids
        ends = [(d.finish_reason, d.stop_reason) for d in deltas if d.finish_reason]
        assert ends == [(whole.finish_reason, whole.stop_reason)]
        endings.add(ends[0][0] if ends[0][1] is None else "stop string")
        if not isinstance(whole.stop_reason, str):
            skip = options["skip_special_tokens"]
            assert whole.text == TOKENIZER.decode(whole.token_ids, skip_special_tokens=skip)
    assert endings == {"stop", "length", "stop string"}
