"""Do the flags follow the records they fill, field by field?"""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from ridgeline.cli import flags, serve, values
from ridgeline.cli.main import parse
from ridgeline.config import EngineConfig
from ridgeline.errors import RequestFault
from ridgeline.request import SamplingParams
from ridgeline.server.config import Limits
from tests.cli.conftest import Cli

ENGINE_ARGV = {
    "tokenizer": "folder",
    "device": "cuda:1",
    "dtype": "bfloat16",
    "load_format": "random",
    "seed": "7",
    "max_model_len": "99",
    "block_size": "32",
    "implementation": "native",
    "num_blocks": "5",
    "kv_cache_memory_bytes": "2MiB",
    "memory_utilization": "0.5",
    "max_num_seqs": "3",
    "max_num_batched_tokens": "64",
    "max_num_mixed_tokens": "48",
    "policy": "priority",
    "ttft_slo_ms": "500.0",
    "tpot_slo_ms": "50.0",
    "max_in_flight": "1",
    "warm_up": "off",
    "speculate": "draft:demo:draft:4",
    "attention_backend": "reference",
    "weight_format": "plain",
    "kv_cache_dtype": "auto",
    "pack_cache": "off",
    "threads": "2",
    "tp": "2",
    "ep": "2",
    "expert_placement": "load",
    "dp": "2",
    "pp": "3",
    "launcher": "join",
    "join_address": "127.0.0.1:7000",
    "collective": "gloo",
    "calibration": "constants.json",
    "event_log": "events.jsonl",
}


def test_every_engine_field_has_a_flag_and_a_help() -> None:
    assert set(ENGINE_ARGV) == set(flags.ENGINE) - {
        *("prefix_caching", "enforce_eager", "deterministic")
    }
    for fields in (flags.ENGINE, serve.SERVER, serve.LIMITS):
        assert all(len(field.meaning.split()) > 1 for field in fields.values())


def test_engine_flags_reach_their_fields_with_their_types() -> None:
    argv = ["bench", "m", "--no-prefix-caching", "--enforce-eager", "--deterministic"]
    for name, value in ENGINE_ARGV.items():
        argv += ["--" + name.replace("_", "-"), value]
    options = flags.engine_options(parse(argv))
    config = EngineConfig(model="m", **options)
    assert config.kv_cache_memory_bytes == 2 << 20
    assert config.prefix_caching is False
    assert config.enforce_eager is True
    assert config.deterministic is True
    assert (config.seed, config.memory_utilization, config.threads) == (7, 0.5, 2)
    assert {name: str(getattr(config, name)) for name in ENGINE_ARGV} | {
        "kv_cache_memory_bytes": "2MiB"
    } == ENGINE_ARGV


def test_flags_not_given_leave_the_defaults_alone() -> None:
    assert flags.engine_options(parse(["bench", "m"])) == {}
    assert flags.sampling_changes(parse(["generate", "m"])) == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("17", 17), ("2KiB", 2048), ("2kb", 2000), ("1.5 MiB", 3 << 19), ("4GB", 4 * 10**9)],
)
def test_byte_sizes(text: str, expected: int) -> None:
    assert values.byte_size(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1", "1 XB", "1e9"])
def test_bad_byte_sizes_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="512MiB"):
        values.byte_size(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("synthetic:0.7", "to measure the engine"),
        ("drafts", "auto, off, ngram"),
        ("ngram:0", "1 .."),
    ],
)
def test_bad_speculation_is_refused(text: str, says: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=says):
        values.speculation(text)
    assert values.speculation("auto") == "auto"


SAMPLING_ARGV = [
    *("--max-tokens", "9", "--min-tokens", "2", "--temperature", "0.5", "--top-k", "4"),
    *("--top-p", "0.9", "--min-p", "0.1", "--repetition-penalty", "1.1"),
    *("--presence-penalty", "0.2", "--frequency-penalty", "0.3", "--logit-bias", "5:-2"),
    *("--logit-bias", "6:1.5", "--seed", "11", "--stop", "x", "--stop", "y y"),
    *("--stop-token-ids", "7,8", "--ignore-eos", "--n", "2", "--best-of", "3"),
    *("--logprobs", "1", "--prompt-logprobs", "0", "--length-penalty", "0.7"),
    *("--early-stopping", "--show-special-tokens"),
]


def test_every_sampling_field_has_a_flag() -> None:
    given = flags.sampling_changes(parse(["generate", "m", *SAMPLING_ARGV]))
    names = set(SamplingParams.__struct_fields__)
    assert set(given) == names - {"beam_width", "structured_outputs"}
    assert SamplingParams(**given) == SamplingParams(
        max_tokens=9,
        min_tokens=2,
        temperature=0.5,
        top_k=4,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={5: -2.0, 6: 1.5},
        seed=11,
        stop=("x", "y y"),
        stop_token_ids=(7, 8),
        ignore_eos=True,
        n=2,
        best_of=3,
        logprobs=1,
        prompt_logprobs=0,
        length_penalty=0.7,
        early_stopping=True,
        skip_special_tokens=False,
    )
    beams = flags.sampling_changes(parse(["generate", "m", "--beam-width", "4"]))
    assert beams == {"beam_width": 4}


def test_what_a_text_must_be(tmp_path: Path) -> None:
    asked = '{"regex": "a"}'
    given = flags.sampling_changes(parse(["generate", "m", "--structured-outputs", asked]))
    assert given == {"structured_outputs": asked}
    path = tmp_path / "schema.json"
    path.write_text('{"type": "null"}')
    given = flags.sampling_changes(parse(["generate", "m", "--json-schema", str(path)]))
    assert SamplingParams(**given).constraint == '{"json":{"type":"null"}}'
    with pytest.raises(argparse.ArgumentTypeError, match="no-such"):
        values.json_schema("no-such")


def test_settings_typed_in_a_chat() -> None:
    allowed = ("temperature", "max_tokens")
    assert flags.setting("temperature = 0.5", allowed) == ("temperature", 0.5)
    assert flags.setting("max_tokens=7", allowed) == ("max_tokens", 7)
    assert flags.setting("temperature=default", allowed) == ("temperature", None)
    for wrong in ("temperature", "n=2", "=3"):
        with pytest.raises(RequestFault, match="max_tokens, temperature"):
            flags.setting(wrong, allowed)
    with pytest.raises(RequestFault, match="not a number"):
        flags.setting("max_tokens=many", allowed)


def test_serve_flags_make_a_serve_config() -> None:
    config = serve.serve_config(
        parse(
            [
                "serve",
                "m",
                "--port",
                "0",
                "--max-body-bytes",
                "1KiB",
                "--run-timeout-s",
                "2.5",
                "--allowed-host",
                "a",
                "--allowed-host",
                "b",
                "--max-num-seqs",
                "3",
            ]
        )
    )
    assert config.engine == EngineConfig(model="m", max_num_seqs=3)
    assert (config.host, config.port, config.allowed_hosts) == ("127.0.0.1", 0, ("a", "b"))
    assert config.limits == Limits(max_body_bytes=1024, run_timeout_s=2.5)
    assert config.allow_anyone_on_the_network_without_a_key is False


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("generate -p x --temperature -1", "--temperature must be between 0 and 100"),
        ("generate -p x --min-tokens 9 --max-tokens 3", "--min-tokens must not exceed"),
        ("generate -p x --stop=", "--stop must not be empty"),
        ("generate -p x --token-ids -5", "argument --token-ids: '-5' is no list of token ids"),
        ("generate /nowhere -p x", "/nowhere: folder not found, and it is no hub id"),
        ("generate -p x --threads 100000", "--threads is 100000; this machine runs "),
        ("chat --top-p 7", "--top-p must be between 0 and 1"),
        ("chat --plain --system x", "--system needs a chat template"),
        ("chat --event-log /nowhere/x", "--event-log /nowhere/x: there is no folder /nowhere"),
        ("bench --compare paged,magic", "--compare: unknown 'magic'"),
        ("bench --max-model-len 0", "--max-model-len is 0; it must be at least 1"),
        ("eval --draft /nowhere", "/nowhere: folder not found"),
        ("profile --trace /nowhere/x", "--trace /nowhere/x: there is no folder"),
        ("simulate", "say which traffic: --rate R, or --trace FILE"),
        ("simulate --rate 1 --policy slo", "--policy slo needs what is promised"),
        ("simulate --rate 1 --draft m", "--draft needs --speculate"),
        ("simulate --rate 1 --sweep --timeline x", "--timeline is of one run"),
        ("predict --batch 0", "argument --batch: '0' is no whole number of at least 1"),
        ("predict --memory-utilization nan", "is no number above 0 and at most 1"),
        ("predict --tp -2", "argument --tp: '-2' is no whole number of at least 1"),
        ("chat --device cuda:x", "unknown --device 'cuda:x'; use auto, cpu, cuda or cuda:N"),
        ("calibrate --device nope", "unknown --device 'nope'; use auto, cpu, cuda or cuda:N"),
        ("quantize -o out --predict-on nope", "--predict-on nope: choose one of a10, "),
        ("calibrate --threads 100000", "--threads is 100000; this machine runs "),
    ],
)
def test_nothing_is_loaded_or_measured_for_what_cannot_be(
    argv: str, message: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*args: object, **options: object) -> None:
        raise AssertionError("too late")

    monkeypatch.setattr("ridgeline.llm.LLM.__init__", never)
    monkeypatch.setattr("ridgeline.cli.machine.this_device", never)
    monkeypatch.setattr("ridgeline.measure.calibrate.calibrate", never)
    code, out, err = cli(*argv.split())
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err
