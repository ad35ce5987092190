"""The offline API: one front for text, token ids, samples, beams, streams and research."""

from __future__ import annotations

import threading
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline import LLM, ConfigError, RequestFault, SamplingParams
from ridgeline.llm import Prompt
from ridgeline.scheduler.policies.base import Refuse
from ridgeline.step import Listener
from tests.conftest import TEST_DEVICE
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    return LLM(str(folder), device=TEST_DEVICE, max_num_seqs=8, num_blocks=200)


def greedy(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | changes))


def naive_greedy(llm: LLM, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(llm.logits(ids)[-1].argmax()))
    return ids[len(prompt) :]


def test_greedy_equals_repeated_full_passes(llm: LLM) -> None:
    prompt = llm.encode("abc")
    (result,) = llm.generate("abc", greedy())
    assert list(result.prompt_token_ids) == prompt
    assert result.token_ids == naive_greedy(llm, prompt, 12)
    assert result.finish_reason == "length"
    assert result.prompt == "abc"


def test_prompts_may_be_text_ids_or_lists_of_both(llm: LLM) -> None:
    ids = llm.encode("hello")
    alone = llm.generate(ids, greedy())[0].token_ids
    prompts: list[Prompt] = ["hello", ids, "other"]
    mixed = llm.generate(prompts, greedy())
    assert [r.token_ids for r in mixed[:2]] == [alone, alone]
    assert llm.engine.is_idle


def test_one_sampling_each(llm: LLM) -> None:
    short, long = llm.generate(["a", "b"], [greedy(max_tokens=2), greedy(max_tokens=5)])
    assert (len(short.token_ids), len(long.token_ids)) == (2, 5)
    with pytest.raises(RequestFault, match="2 prompts but 1"):
        llm.generate(["a", "b"], [greedy()])


def test_same_seed_same_tokens_whatever_the_company(llm: LLM) -> None:
    sampling = SamplingParams(max_tokens=20, seed=7, temperature=1.2, ignore_eos=True)
    alone = llm.generate("story", sampling)[0].token_ids
    others = [SamplingParams(max_tokens=25, seed=i, ignore_eos=True) for i in range(5)]
    crowd = llm.generate(["x", "story", "y", "z", "w", "v"], [others[0], sampling, *others[1:]])
    assert crowd[1].token_ids == alone
    other = SamplingParams(max_tokens=20, seed=8, temperature=1.2, ignore_eos=True)
    assert llm.generate("story", other)[0].token_ids != alone


def test_n_samples_share_one_prefill(llm: LLM) -> None:
    prompt = list(range(5, 105))
    shapes: list[int] = []

    class Count(Listener):
        def on_step(self, record: Any) -> None:
            shapes.append(sum(new for new, _ in record.plan.shape))

    counter = Count()
    llm.engine.listeners.append(counter)
    sampling = SamplingParams(n=4, max_tokens=3, seed=1, ignore_eos=True)
    (result,) = llm.generate(prompt, sampling)
    llm.engine.listeners.remove(counter)
    assert len(result.outputs) == 4
    assert len({o.token_ids for o in result.outputs}) > 1
    # One prefill of 100 tokens, three times the last prompt token, two more tokens for each of 4.
    assert sum(shapes) == 100 + 3 + 4 * 2
    first = SamplingParams(max_tokens=3, seed=1, ignore_eos=True)
    assert result.outputs[0].token_ids == tuple(llm.generate(prompt, first)[0].token_ids)


def test_best_of_returns_the_likeliest(llm: LLM) -> None:
    many = SamplingParams(n=6, max_tokens=6, seed=3, logprobs=0, ignore_eos=True)
    best = SamplingParams(n=2, best_of=6, max_tokens=6, seed=3, ignore_eos=True)
    (all_of_them,) = llm.generate("q", many)
    (chosen,) = llm.generate("q", best)
    means = {o.token_ids: (o.cumulative_logprob or 0.0) / 6 for o in all_of_them.outputs}
    ranked = sorted(means, key=lambda ids: -means[ids])
    assert [o.token_ids for o in chosen.outputs] == ranked[:2]
    assert [o.index for o in chosen.outputs] == [0, 1]
    assert chosen.outputs[0].logprobs is None


def test_stop_strings_and_tokens(llm: LLM) -> None:
    (free,) = llm.generate("abc", greedy(max_tokens=40))
    stop = free.text[8:11]
    where = free.text.index(stop)
    (stopped,) = llm.generate("abc", greedy(max_tokens=40, stop=stop))
    assert stopped.text == free.text[:where]
    assert stopped.finish_reason == "stop"
    assert stopped.outputs[0].stop_reason == stop
    assert len(stopped.token_ids) <= len(free.token_ids)
    pieces = list(llm.stream("abc", greedy(max_tokens=40, stop=stop)))
    assert "".join(piece.text for piece in pieces) == stopped.text
    assert [i for piece in pieces for i in piece.token_ids] == stopped.token_ids
    token = free.token_ids[5]
    cut = free.token_ids.index(token)
    (by_id,) = llm.generate("abc", greedy(max_tokens=40, stop_token_ids=[token]))
    assert by_id.token_ids == free.token_ids[:cut]
    assert (by_id.finish_reason, by_id.outputs[0].stop_reason) == ("stop", token)
    assert llm.engine.is_idle


def test_min_tokens_holds_back_the_stop(llm: LLM) -> None:
    (free,) = llm.generate("abc", greedy())
    token = free.token_ids[0]
    (held,) = llm.generate("abc", greedy(stop_token_ids=[token], min_tokens=4))
    assert len(held.token_ids) >= 4
    assert token not in held.token_ids[:4]


def test_logprobs_equal_the_full_pass(llm: LLM) -> None:
    sampling = greedy(max_tokens=5, logprobs=3, prompt_logprobs=2)
    (result,) = llm.generate("some text", sampling)
    ids = [*result.prompt_token_ids, *result.token_ids]
    table = torch.log_softmax(llm.logits(ids), -1)
    assert result.prompt_logprobs is not None
    assert result.prompt_logprobs[0] is None
    for i, entry in enumerate(result.prompt_logprobs[1:], 1):
        assert entry is not None
        assert entry.token_id == ids[i]
        assert entry.logprob == pytest.approx(table[i - 1, ids[i]].item(), abs=1e-3)
        assert len(entry.top) == 2
    assert result.logprobs is not None
    for i, entry in enumerate(result.logprobs, len(result.prompt_token_ids)):
        assert entry.logprob == pytest.approx(table[i - 1, ids[i]].item(), abs=1e-3)
        assert len(entry.top) == 3


def test_beam_search_returns_ranked_beams(llm: LLM) -> None:
    (result,) = llm.generate("abc", greedy(beam_width=4, n=3, max_tokens=6))
    scores = [o.cumulative_logprob for o in result.outputs]
    assert len(scores) == 3
    assert scores == sorted(scores, key=lambda s: -(s or 0.0))
    assert len({o.token_ids for o in result.outputs}) == 3


def test_a_closed_stream_frees_everything(llm: LLM) -> None:
    pieces = llm.stream("abc", greedy(max_tokens=100))
    next(pieces)
    pieces.close()
    other = llm.generate("abc", greedy(max_tokens=3))[0]
    assert len(other.token_ids) == 3
    assert llm.engine.is_idle


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 40])
def test_answers_that_nobody_watches_are_those_of_a_stream(llm: LLM, num_tokens: int) -> None:
    """Their outputs wait until there are some."""
    sampling = SamplingParams(
        max_tokens=num_tokens, n=2, seed=3, logprobs=2, prompt_logprobs=1, ignore_eos=True
    )
    pieces = list(llm.stream("abcab", sampling))
    (result,) = llm.generate(["abcab"], sampling)
    for index, choice in enumerate(result.outputs):
        mine = [piece for piece in pieces if piece.index == index]
        assert choice.text == "".join(piece.text for piece in mine)
        assert list(choice.token_ids) == [i for piece in mine for i in piece.token_ids]
        assert choice.logprobs == tuple(entry for piece in mine for entry in piece.logprobs)
        assert choice.finish_reason == mine[-1].finish_reason == "length"
    assert result.prompt_logprobs is not None
    assert len(result.prompt_logprobs) == len(llm.encode("abcab"))
    assert result.metrics.num_output_tokens == 2 * num_tokens


def test_a_stop_string_ends_an_answer_at_once(llm: LLM) -> None:
    """It is looked for in each step: an answer with one must not wait for more outputs."""
    text = llm.generate(["abc"], greedy(max_tokens=40))[0].text
    (ended,) = llm.generate(["abc"], greedy(max_tokens=40, stop=[text[4:7]]))
    assert ended.finish_reason == "stop"
    assert ended.text == text[: text.index(text[4:7])]
    assert ended.metrics.num_output_tokens < 16


def test_two_streams_at_once(llm: LLM) -> None:
    wanted = [r.text for r in llm.generate(["one", "two"], greedy(max_tokens=20))]
    first, second = (
        llm.stream("one", greedy(max_tokens=20)),
        llm.stream("two", greedy(max_tokens=20)),
    )
    texts = ["", ""]
    for a, b in zip(first, second, strict=False):
        texts[0] += a.text
        texts[1] += b.text
    texts[0] += "".join(piece.text for piece in first)
    texts[1] += "".join(piece.text for piece in second)
    assert texts == wanted


def test_chat_uses_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    result = llm.chat(messages, greedy(max_tokens=4))
    assert list(result.prompt_token_ids) == llm.encode("<|user|>hi<|assistant|>")
    streamed = "".join(p.text for p in llm.chat_stream(messages, greedy(max_tokens=4)))
    assert streamed == result.text
    with pytest.raises(RequestFault, match="unknown role"):
        llm.chat([{"role": "wizard", "content": "x"}])


@pytest.mark.parametrize(
    ("prompt", "sampling", "code"),
    [
        ([], {}, "empty_input"),
        ([1, 999], {}, "invalid_token_id"),
        ([1, -1], {}, "invalid_token_id"),
        ([1] * 600, {}, "context_length_exceeded"),
        ([1] * 500, {"max_tokens": 100}, "context_length_exceeded"),
        ([1], {"stop_token_ids": [999]}, "invalid_token_id"),
        ([1], {"logit_bias": {999: 1.0}}, "invalid_token_id"),
    ],
)
def test_bad_requests_name_the_field(
    llm: LLM, prompt: list[int], sampling: dict[str, Any], code: str
) -> None:
    prompts: list[Prompt] = [prompt, "fine"]
    with pytest.raises(RequestFault) as caught:
        llm.generate(prompts, SamplingParams(**sampling))
    assert caught.value.code == code
    assert caught.value.param
    assert llm.engine.is_idle


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", float("nan")),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", 1.5),
        ("min_p", 2),
        ("max_tokens", 0),
        ("n", 9),
        ("best_of", 9),
        ("logprobs", 21),
        ("stop", [""]),
        ("stop", ["a"] * 65),
        ("stop", ["a" * 257]),
        ("stop", 3),
        ("logit_bias", {1: 101.0}),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3),
        ("seed", 1.0),
        ("beam_width", 0),
    ],
)
def test_sampling_params_refuse_bad_values(field: str, value: object) -> None:
    with pytest.raises(RequestFault) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field
    assert field in str(caught.value)


class Text(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "prompts",
    [
        np.array([[3, 4], [5, 6]]),
        torch.tensor([[3, 4], [5, 6]]),
        [np.array([3, 4], np.uint16), torch.tensor([5, 6])],
        ([3, 4], (5, 6)),
        ([3 + i, 4 + i] for i in (0, 2)),
        [array("i", [3, 4]), range(5, 7)],
        [[np.int64(3), torch.tensor(4)], iter([5, 6])],
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_stands_for_lists_of_ids_is_served(llm: LLM, prompts: Any) -> None:
    results = llm.generate(prompts, greedy(max_tokens=3))
    assert [result.prompt_token_ids for result in results] == [(3, 4), (5, 6)]


def test_ids_of_one_prompt_may_be_an_array_too(llm: LLM) -> None:
    wanted = llm.generate([3, 4], greedy(max_tokens=3))[0].token_ids
    given: list[Any] = [np.array([3, 4]), torch.tensor([3, 4]), [np.int32(3), 4], iter([3, 4])]
    for ids in given:
        assert llm.generate(ids, greedy(max_tokens=3))[0].token_ids == wanted
    streamed = llm.stream(np.array([3, 4]), greedy(max_tokens=3))
    assert [token_id for piece in streamed for token_id in piece.token_ids] == wanted
    logits = llm.logits([3, 4])
    assert torch.equal(llm.logits(np.array([3, 4])), logits)  # type: ignore[arg-type]
    (result,) = llm.generate(Text("abc"), greedy(max_tokens=3))
    assert type(result.prompt) is str


@pytest.mark.parametrize(
    ("prompts", "param", "says"),
    [
        (None, "prompts", "prompts is None; give a text or a list of token ids, or"),
        (5, "prompts", "prompts is int; "),
        (b"abc", "prompts", "decode bytes to text first"),
        ({"prompt": "a"}, "prompts", "prompts is dict; "),
        ({"a"}, "prompts", "prompts is set; "),
        (object(), "prompts", "prompts is object; "),
        (np.array(3), "prompts", "prompts is ndarray; "),
        ([], "prompts", "no prompt was given"),
        (np.array([]), "prompts", "no prompt was given"),
        ([None], "prompts[0]", "prompts[0] is None; give a text or a list of token ids"),
        (["a", 3], "prompts[1]", "prompts[1] is int; "),
        (["a", b"b"], "prompts[1]", "decode bytes to text first"),
        ([{"role": "user", "content": "x"}], "prompts[0]", "messages go to chat"),
        ([3, "a"], "prompt[1]", "prompt[1] is not an integer"),
        ([3, [4]], "prompt[1]", "prompt[1] is not an integer"),
        ([[[3]]], "prompt[0]", "prompt[0] is not an integer"),
        (np.array([3.0]), "prompt[0]", "prompt[0] is not an integer"),
        ([True], "prompt[0]", "prompt[0] is not an integer"),
        (["a", []], "prompts[1]", "prompts[1]: the prompt is empty"),
        (["a", [3, 999]], "prompts[1][1]", "prompts[1]: prompt[1]: token id 999 is not in"),
        (["a", [3] * 600], "prompts[1]", "prompts[1]: the prompt has 600 tokens"),
        ("\ud800", "prompt", "not valid Unicode"),
    ],
)
def test_what_is_no_prompt_is_named(llm: LLM, prompts: Any, param: str, says: str) -> None:
    with pytest.raises(RequestFault) as caught:
        llm.generate(prompts, greedy())
    assert says in str(caught.value)
    assert caught.value.param == param
    assert llm.engine.is_idle


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        (5, "sampling"),
        ("x", "sampling"),
        ({"max_tokens": 3}, "sampling"),
        ([SamplingParams()], "sampling"),
        ([SamplingParams(), {"max_tokens": 3}], "sampling[1]"),
        (np.array([1, 2]), "sampling[0]"),
        (SamplingParams, "sampling"),
    ],
)
def test_what_are_no_parameters_is_named(llm: LLM, sampling: Any, param: str) -> None:
    with pytest.raises(RequestFault) as caught:
        llm.generate(["a", "b"], sampling)
    assert caught.value.param == param
    assert len(llm.generate(["a", "b"], iter([None, greedy(max_tokens=2)]))) == 2


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ("hi", "messages"),
        ([], "messages"),
        ({"role": "user", "content": "x"}, "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": b"x"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": "\ud800"}], "messages"),
    ],
)
def test_what_are_no_messages_is_named(llm: LLM, messages: Any, param: str) -> None:
    for ask in (llm.chat, llm.chat_stream):
        with pytest.raises(RequestFault) as caught:
            ask(messages, greedy())
        assert caught.value.param == param


def test_text_parts_and_derived_texts_are_messages(llm: LLM) -> None:
    plain = llm.encode_chat([{"role": "user", "content": "ab"}])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert llm.encode_chat(iter([{"role": "user", "content": parts}])) == plain
    assert llm.encode_chat([{"role": Text("user"), "content": np.str_("ab")}]) == plain


def test_an_exception_in_a_loop_over_a_stream_frees_its_blocks(llm: LLM) -> None:
    free = llm.engine.scheduler.blocks.num_free_blocks

    def loop() -> None:
        for _ in llm.stream("abc", greedy(max_tokens=100)):
            assert llm.engine.scheduler.blocks.num_free_blocks < free
            raise KeyError

    with pytest.raises(KeyError):
        loop()
    assert llm.engine.is_idle
    assert llm.engine.scheduler.blocks.num_free_blocks == free


def test_a_stream_that_is_collected_in_the_middle_of_a_step_waits_for_its_end(llm: LLM) -> None:
    """As the collector of garbage may do."""
    streams = [llm.stream("abc", greedy(max_tokens=100))]
    next(streams[0])

    class Drop(Listener):
        def on_step(self, record: Any) -> None:
            streams.clear()

    llm.engine.listeners.append(drop := Drop())
    (result,) = llm.generate("abc", greedy())
    llm.engine.listeners.remove(drop)
    assert result.token_ids == naive_greedy(llm, llm.encode("abc"), 12)
    assert not streams
    assert llm.engine.is_idle


def test_threads_share_the_engine(llm: LLM) -> None:
    wanted = llm.generate("abc", greedy(max_tokens=40))[0].token_ids
    answers: list[list[int]] = []

    def ask(streams: bool) -> None:
        if streams:
            pieces = llm.stream("abc", greedy(max_tokens=40))
            answers.append([token_id for piece in pieces for token_id in piece.token_ids])
        else:
            answers.append(llm.generate(["abc", "b"], greedy(max_tokens=40))[0].token_ids)

    threads = [threading.Thread(target=ask, args=(i % 2 == 0,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [wanted] * 6
    assert llm.engine.is_idle


def test_nothing_is_served_after_close(tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "num_blocks": 40, "max_model_len": 64}
    with LLM(make_tiny_model(tmp_path / "m"), **options) as llm:
        opened = llm.stream("abc", greedy(max_tokens=40))
        next(opened)
    llm.close()  # once more
    asks: list[Any] = [
        lambda: llm.generate("abc"),
        lambda: llm.stream("abc"),
        lambda: llm.chat([{"role": "user", "content": "x"}]),
        lambda: llm.logits([3]),
        lambda: list(opened),
        llm.__enter__,
    ]
    for ask in asks:
        with pytest.raises(RequestFault, match="closed") as caught:
            ask()
        assert caught.value.code == "closed"
    assert llm.engine.is_idle


def test_what_a_policy_turns_away_says_so_and_the_rest_is_served(tmp_path: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "num_blocks": 40, "max_model_len": 64}
    promise: dict[str, Any] = {"policy": "slo", "ttft_slo_ms": 1000, "tpot_slo_ms": 1000}
    with LLM(make_tiny_model(tmp_path / "m"), **options, **promise) as llm:
        policy = llm.engine.scheduler.policy
        admit, count = policy.admit, iter(range(100))
        refuse = Refuse(2.5, "too late")
        policy.admit = (  # type: ignore[method-assign]
            lambda request, now: refuse if next(count) in (1, 2, 5, 6) else admit(request, now)
        )
        results = llm.generate(["a", "b", "c"], greedy(n=2, max_tokens=3))  # the second of "a", ...
        assert [r.error is None for r in results] == [False, False, True]
        assert "policy slo turned it away: too late; try again in 2.5 s" in (results[0].error or "")
        assert [r.finish_reason for r in results] == ["error", "error", "length"]
        for ask in (lambda: llm.generate("d", greedy()), lambda: next(llm.stream("d", greedy()))):
            with pytest.raises(RequestFault) as caught:
                ask()
            fault = caught.value
            assert (fault.param, fault.code) == ("policy", "overloaded")
            assert fault.retry_after_s == 2.5
        assert llm.engine.is_idle


def test_a_folder_without_tokenizer_serves_ids(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", tokenizer=False)
    bare = LLM(str(folder), device="cpu", num_blocks=20, max_model_len=64)
    (result,) = bare.generate([3, 4, 5], greedy(max_tokens=4))
    assert len(result.token_ids) == 4
    assert result.text == ""
    with pytest.raises(RequestFault, match="token ids"):
        bare.generate("text", greedy())
    with pytest.raises(RequestFault, match="stop"):
        bare.generate([3, 4], greedy(stop="x"))


def test_a_tokenizer_from_another_folder(tmp_path: Path) -> None:
    bare = make_tiny_model(tmp_path / "m", tokenizer=False)
    other = make_tiny_model(tmp_path / "other", weights=False)
    options: dict[str, Any] = {"device": "cpu", "num_blocks": 20, "max_model_len": 64}
    with LLM(str(bare), tokenizer=str(other), **options) as llm:
        assert llm.generate("text", greedy(max_tokens=4))[0].text
    for named in ("nowhere", "m", ""):
        where = str(tmp_path / named) if named else ""
        with pytest.raises(ConfigError, match=r"tokenizer '.*for the model's own"):
            LLM(str(other), tokenizer=where, **options)
    with pytest.raises(ConfigError, match="tokenizer '/nowhere': not found"):  # before a fetch
        LLM("no-such/model", tokenizer="/nowhere", **options)


def test_random_weights_from_a_config_alone(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", tokenizer=False, weights=False)
    with pytest.raises(ConfigError, match="safetensors"):
        LLM(str(folder), device="cpu")
    options: dict[str, Any] = {"device": "cpu", "load_format": "random", "num_blocks": 20}
    first = LLM(str(folder), max_model_len=64, **options).generate([3, 4], greedy())[0].token_ids
    again = LLM(str(folder), max_model_len=64, **options).generate([3, 4], greedy())[0].token_ids
    assert first == again


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "tpu"}, "tpu"),
        ({"dtype": "float8"}, "float8"),
        ({"load_format": "pickle"}, "pickle"),
        ({"max_model_len": 100_000}, "max_model_len"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"num_blocks": 2, "max_model_len": 512}, "max_model_len"),
        ({"policy": "magic"}, "magic"),
        ({"attention_backend": "magic"}, "magic"),
        ({"weight_format": "magic"}, "magic"),
        ({"kv_cache_dtype": "magic"}, "magic"),
        ({"memory_utilization": 1.5}, "memory_utilization"),
        ({"max_in_flight": 5}, "max_in_flight"),
        ({"max_model_length": 64}, "no option max_model_length; did you mean max_model_len"),
        ({"memory_utilization": "1"}, "memory_utilization is '1'; it must be a number"),
        ({"device": 3}, "device is 3; it must be a text"),
        ({"prefix_caching": "yes"}, "prefix_caching is 'yes'; it must be True or False"),
        ({"block_size": True}, "block_size is True; it must be a whole number"),
    ],
)
def test_bad_options_are_refused(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    folder = make_tiny_model(tmp_path / "m")
    with pytest.raises(ConfigError, match=words):
        LLM(str(folder), **({"device": "cpu"} | options))


def test_options_may_be_those_of_torch_numpy_and_pathlib(tmp_path: Path) -> None:
    llm = LLM(
        make_tiny_model(tmp_path / "m"),
        device=torch.device("cpu"),
        dtype=torch.float32,
        max_model_len=np.int64(64),
        num_blocks=np.int32(20),
    )
    assert (llm.resolved.dtype, llm.resolved.max_model_len) == ("float32", 64)
