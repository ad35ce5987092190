"""An EAGLE-3 head read from files says what the paper's formulas say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ridgeline.architectures import read_spec
from ridgeline.architectures.eagle3_head import (
    EagleSpec,
    eagle3_names,
    is_eagle3,
    read_eagle3,
)
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.attention import choose_backend
from ridgeline.attention.layout import ForwardBatch
from ridgeline.errors import ConfigError
from ridgeline.kvcache import KVCache
from ridgeline.loader import open_checkpoint
from ridgeline.quantization import open_weight_format
from ridgeline.speculation.eagle3 import Eagle3Head
from tests.layers.driving import Driver
from tests.speculation.head_reference import attended, fed_forward, random_tensors, rms
from tests.speculation.scene import MAX_MODEL_LEN, VOCAB, make_decoder, some_tokens
from tests.tiny_model import tiny_config

WIDTH, HEAD_DIM, KNOWN = 32, 16, 40  # of states, of heads, ids that the head can draft
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "vocab_size": VOCAB,
    "draft_vocab_size": KNOWN,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
SHAPES: dict[str, tuple[int, ...]] = {
    "fc.weight": (WIDTH, 3 * WIDTH),
    "norm.weight": (WIDTH,),
    "lm_head.weight": (KNOWN, WIDTH),
    "midlayer.hidden_norm.weight": (WIDTH,),
    "midlayer.input_layernorm.weight": (WIDTH,),
    "midlayer.post_attention_layernorm.weight": (WIDTH,),
    "midlayer.self_attn.q_proj.weight": (64, 2 * WIDTH),
    "midlayer.self_attn.k_proj.weight": (32, 2 * WIDTH),
    "midlayer.self_attn.v_proj.weight": (32, 2 * WIDTH),
    "midlayer.self_attn.o_proj.weight": (WIDTH, 64),
    "midlayer.mlp.gate_proj.weight": (48, WIDTH),
    "midlayer.mlp.up_proj.weight": (48, WIDTH),
    "midlayer.mlp.down_proj.weight": (WIDTH, 48),
}
TARGET: dict[str, Any] = {"num_hidden_layers": 6, "hidden_size": WIDTH}
# What the published heads do, and a later kind that puts the normed states into the residual.
RESIDUALS: dict[str, dict[str, Any]] = {
    "as published": {},
    "normed residual": {"norm_before_residual": True},
}


def known_ids() -> torch.Tensor:
    """Ascending ids of the target, with the last of all among them."""
    return torch.arange(KNOWN) * (VOCAB - 1) // (KNOWN - 1)


def tensors(seed: int = 7) -> dict[str, torch.Tensor]:
    some = random_tensors(SHAPES, seed)
    is_known = torch.zeros(VOCAB, dtype=torch.bool)
    is_known[known_ids()] = True
    return some | {"d2t": known_ids() - torch.arange(KNOWN), "t2d": is_known}


def read(config: dict[str, Any]) -> EagleSpec:
    target = read_spec(tiny_config(vocab_size=VOCAB, **TARGET))
    return read_eagle3(config, target)


class Rig:
    """A target, a head beside it, and paged cache for one row of it."""

    def __init__(self, folder: Path, config: dict[str, Any], some: dict[str, torch.Tensor]) -> None:
        self.target = make_decoder(**TARGET)
        where, dtype = self.target.device, self.target.dtype
        self.spec = read_eagle3(config, self.target.spec)
        save_file(some, str(folder / "model.safetensors"))
        source = open_checkpoint(folder)
        self.head = Eagle3Head(
            self.spec,
            eagle3_names(source.names()),
            self.target.embedding,
            attention=choose_backend("auto", self.spec.model, dtype, where),
            weight_format=open_weight_format("auto"),
            max_model_len=MAX_MODEL_LEN,
            device=where,
        )
        self.head.load(source)
        model = self.head.cache_spec
        self.kv = KVCache(model, kv_groups(model), 32, 4, dtype, where)
        self.driver = Driver(self.target, block_size=4, num_blocks=32)

    def batch(self, tokens: list[int], following: list[int]) -> tuple[ForwardBatch, torch.Tensor]:
        """The step of the target for these tokens, with those that follow them for the head, and
        what it taps."""
        batch = self.driver.batch({"r": tokens})
        shape = (3, len(tokens), WIDTH)
        taps = torch.empty(shape, dtype=self.target.dtype, device=self.target.device)
        self.target.forward_tapped(batch, self.driver.kv, self.spec.taps, taps)
        ids = torch.tensor(following, device=self.target.device)
        return ForwardBatch(ids, batch.positions_T, batch.layout), torch.cat(list(taps), -1)


def reference(
    some: dict[str, torch.Tensor],
    embedding_VE: torch.Tensor,
    tapped_TX: torch.Tensor,
    following: list[int],
    *,
    num_draft_tokens: int,
    is_normed: bool,
) -> tuple[torch.Tensor, list[int]]:
    """Logits [T, D] at each position given the target's states, then greedy drafts after the last:
    the head goes on with its own states, and starts over from nothing for each."""
    stem = "midlayer."
    states = tapped_TX @ some["fc.weight"].T
    draft_tokens: list[int] = []
    first: torch.Tensor | None = None
    while True:
        tokens = embedding_VE[torch.tensor([*following, *draft_tokens])]
        normed = rms(states, some[f"{stem}hidden_norm.weight"])
        pair = torch.cat((rms(tokens, some[f"{stem}input_layernorm.weight"]), normed), -1)
        x = (normed if is_normed else states) + attended(pair, some, stem, HEAD_DIM)
        x = x + fed_forward(rms(x, some[f"{stem}post_attention_layernorm.weight"]), some, stem)
        logits = rms(x, some["norm.weight"]) @ some["lm_head.weight"].T
        first = logits if first is None else first
        if len(draft_tokens) == num_draft_tokens:
            return first, draft_tokens
        draft_tokens.append(int(known_ids()[logits[-1].argmax()]))
        states = torch.cat((states, x[-1:]))


@pytest.mark.parametrize("kind", RESIDUALS)
def test_it_says_what_the_formulas_say(kind: str, tmp_path: Path) -> None:
    """A prompt in two pieces, then drafts one by one, each from the state before."""
    some, config = tensors(), CONFIG | RESIDUALS[kind]
    rig = Rig(tmp_path, config, some)
    tokens = some_tokens(11, 1)
    prompt, following = tokens[:10], tokens[1:]
    said, tapped, states = [], [], torch.empty(0)
    for begin, end in ((0, 6), (6, 10)):
        batch, taps = rig.batch(prompt[begin:end], following[begin:end])
        states = rig.head.forward(rig.head.fuse(taps), batch, rig.kv)
        said.append(rig.head.logits(states))
        tapped.append(taps)
    draft_tokens: list[int] = []
    state = states[-1:].clone()
    for _ in range(4):
        whole = rig.head.target_logits(state)
        assert whole.shape == (1, VOCAB)
        assert int(whole.isfinite().sum()) == KNOWN
        draft_tokens.append(int(whole.argmax()))
        if len(draft_tokens) < 4:
            batch, _ = rig.batch(
                [0], draft_tokens[-1:]
            )  # any token: the target's states are not used
            state = rig.head.forward(state, batch, rig.kv)
    embedding = rig.target.embedding.parameters["weight"].cpu().float()
    wanted, chosen = reference(
        some,
        embedding,
        torch.cat(tapped).cpu(),
        following,
        num_draft_tokens=4,
        is_normed=kind == "normed residual",
    )
    torch.testing.assert_close(torch.cat(said).cpu(), wanted, rtol=1e-4, atol=1e-4)
    assert draft_tokens == chosen


def test_taps_are_states_before_layers() -> None:
    """A target cut after so many layers has these as its last."""
    target = make_decoder(**TARGET)
    tokens = some_tokens(7, 2)
    driver = Driver(target, block_size=4, num_blocks=16)
    taps = torch.empty(3, 7, WIDTH, device=target.device)
    last = target.forward_tapped(driver.batch({"r": tokens}), driver.kv, (0, 4, 6), taps)
    ids = torch.tensor(tokens, device=target.device)
    torch.testing.assert_close(taps[0], target.embedding.embed(ids))
    torch.testing.assert_close(taps[2], last)
    whole, driver = target.layers, Driver(target, block_size=4, num_blocks=16)
    target.layers = whole[:4]
    torch.testing.assert_close(taps[1], target.forward(driver.batch({"r": tokens}), driver.kv))


def test_what_its_parameters_take(tmp_path: Path) -> None:
    rig = Rig(tmp_path, CONFIG, tensors())
    numbers = sum(torch.Size(shape).numel() for shape in SHAPES.values())
    assert rig.head.num_bytes == 4 * numbers + 8 * KNOWN


def test_the_names_of_other_tools(tmp_path: Path) -> None:
    """`layers.0.` and a config with the layer's keys in a section of its own."""
    layer = {k: v for k, v in CONFIG.items() if k not in ("architectures", "draft_vocab_size")}
    config = {
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": KNOWN,
        "norm_before_residual": False,
        "transformer_layer_config": layer,
    }
    assert is_eagle3(config)
    some = tensors()
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in some.items()}
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    other, plain = Rig(tmp_path / "a", config, renamed), Rig(tmp_path / "b", CONFIG, some)
    assert other.spec == plain.spec
    batch, taps = plain.batch([3, 4, 5], [4, 5, 6])
    said = [rig.head.forward(rig.head.fuse(taps), batch, rig.kv) for rig in (other, plain)]
    assert torch.equal(*said)


TAPS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "default": ({}, (2, 3, 3)),
    "before": ({"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}, (2, 4, 6)),
    "after": ({"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, (2, 4, 6)),
    "in a section": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}},
        (2, 3, 5),
    ),
}


@pytest.mark.parametrize("name", TAPS)
def test_which_states_it_reads(name: str) -> None:
    changes, taps = TAPS[name]
    assert read(CONFIG | changes).taps == taps


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"architectures": ["LlamaForCausalLM"]}, "EAGLE-3 head has one of"),
    "another vocabulary": ({"vocab_size": 96}, "vocab_size is 96 and the model's 97"),
    "other states": ({"hidden_size": 16}, "reads hidden states of 16 numbers and the model's"),
    "another layer": ({"model_type": "qwen3"}, "model_type is 'qwen3'"),
    "a later kind": ({"norm_before_fc": True}, "norm_before_fc is True"),
    "too many ids": ({"draft_vocab_size": 98}, "draft_vocab_size is 98"),
    "layers that are not there": (
        {"eagle_aux_hidden_state_layer_ids": [2, 3, 7]},
        r"is \[2, 3, 7\]; the model has 6 layers",
    ),
    "two layers to read": ({"eagle_aux_hidden_state_layer_ids": [2, 3]}, "must be 3 numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_do_not_go_with_the_model(name: str) -> None:
    changes, said = REFUSED[name]
    with pytest.raises(ConfigError, match=said):
        read(CONFIG | changes)


def test_a_model_that_is_too_short() -> None:
    target = read_spec(tiny_config(vocab_size=VOCAB, num_hidden_layers=2))
    with pytest.raises(ConfigError, match="2 layers is too short"):
        read_eagle3(CONFIG, target)


def test_files_that_are_no_head() -> None:
    names = list(tensors())
    assert "embedding" not in eagle3_names(names)
    assert eagle3_names([*names, "embed_tokens.weight"])["embedding"] == "embed_tokens.weight"
    with pytest.raises(ConfigError, match=r"lacks 'fc.weight', and 0 more"):
        eagle3_names([name for name in names if name != "fc.weight"])
    with pytest.raises(ConfigError, match="several layers"):
        eagle3_names([*names, "layers.1.mlp.up_proj.weight"])


DAMAGED: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "a shape": ({"fc.weight": torch.zeros(WIDTH, WIDTH)}, "fc.weight has shape"),
    "ids of nobody": ({"d2t": torch.full((KNOWN,), VOCAB)}, "ids outside"),
    "ids that are no numbers": ({"d2t": torch.zeros(KNOWN)}, "d2t has shape"),
    "no ids": ({"d2t": None}, "lacks 'd2t'"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_files(name: str, tmp_path: Path) -> None:
    changes, said = DAMAGED[name]
    some = {name: t for name, t in ({**tensors(), **changes}).items() if t is not None}
    with pytest.raises(ConfigError, match=said):
        Rig(tmp_path, CONFIG, some)


def test_a_head_of_another_size_has_its_own_embedding(tmp_path: Path) -> None:
    narrow = 24
    shapes = {
        name: tuple({WIDTH: narrow, 2 * WIDTH: 2 * narrow}.get(size, size) for size in shape)
        for name, shape in SHAPES.items()
    }
    shapes |= {
        "fc.weight": (narrow, 3 * WIDTH),
        "midlayer.self_attn.q_proj.weight": (64, 2 * narrow),
        "midlayer.self_attn.o_proj.weight": (narrow, 64),
        "midlayer.self_attn.k_proj.weight": (32, 2 * narrow),
        "midlayer.self_attn.v_proj.weight": (32, 2 * narrow),
        "embed_tokens.weight": (VOCAB, narrow),
    }
    some = random_tensors(shapes, 3) | {"d2t": known_ids() - torch.arange(KNOWN)}
    config = CONFIG | {"hidden_size": narrow, "target_hidden_size": WIDTH}
    rig = Rig(tmp_path, config, some)
    tokens = some_tokens(6, 4)
    batch, taps = rig.batch(tokens[:5], tokens[1:])
    said = rig.head.logits(rig.head.forward(rig.head.fuse(taps), batch, rig.kv))
    embedding = some["embed_tokens.weight"]
    wanted, _ = reference(
        some, embedding, taps.cpu(), tokens[1:], num_draft_tokens=0, is_normed=False
    )
    torch.testing.assert_close(said.cpu(), wanted, rtol=1e-4, atol=1e-4)
    del some["embed_tokens.weight"]
    with pytest.raises(ConfigError, match="no embedding of its own"):
        Rig(tmp_path, config, some)
