"""MTP modules read from a model's files say what the paper's formulas say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ridgeline.architectures import read_spec
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.architectures.mtp_head import LAYOUTS, MTPLayout, mtp_shapes, read_mtp
from ridgeline.architectures.spec import ModelSpec
from ridgeline.attention import choose_backend
from ridgeline.attention.layout import ForwardBatch
from ridgeline.errors import ConfigError
from ridgeline.kvcache import KVCache
from ridgeline.loader import open_checkpoint
from ridgeline.quantization import open_weight_format
from ridgeline.speculation.mtp import MTPHead
from tests.architectures.test_planned import deepseek
from tests.layers.driving import Driver
from tests.speculation.head_reference import layer, random_tensors, rms
from tests.speculation.scene import VOCAB, make_decoder, some_tokens
from tests.tiny_model import tiny_config

WIDTH, HEAD_DIM = 32, 16
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "head_dim": HEAD_DIM},
}
BY_NAME = {layout.name: layout for layout in LAYOUTS}


def stem_of(layout: MTPLayout, num_layers: int) -> str:
    return {"deepseek": f"model.layers.{num_layers}.", "mimo": "model.mtp_layers.0."}[layout.name]


def names_of(layout: MTPLayout, num_layers: int, *, has_bias: bool) -> dict[str, tuple[int, ...]]:
    """As the public checkpoints have them."""
    stem = stem_of(layout, num_layers)
    own = (layout.token_norm, layout.hidden_norm, layout.final_norm)
    norms = (*own, "input_layernorm", "post_attention_layernorm")
    shapes: dict[str, tuple[int, ...]] = {f"{stem}{name}.weight": (WIDTH,) for name in norms}
    shapes[f"{stem}{layout.projection}.weight"] = (WIDTH, 2 * WIDTH)
    for role, size in (("q", 64), ("k", 32), ("v", 32)):
        shapes[f"{stem}self_attn.{role}_proj.weight"] = (size, WIDTH)
        if has_bias:
            shapes[f"{stem}self_attn.{role}_proj.bias"] = (size,)
    shapes[f"{stem}self_attn.o_proj.weight"] = (WIDTH, 64)
    shapes |= {f"{stem}mlp.{role}_proj.weight": (64, WIDTH) for role in ("gate", "up")}
    shapes[f"{stem}mlp.down_proj.weight"] = (WIDTH, 64)
    return shapes


class Rig:
    def __init__(self, folder: Path, kind: str, some: dict[str, torch.Tensor]) -> None:
        self.target = make_decoder(**TARGETS[kind])
        save_file(some, str(folder / "model.safetensors"))
        source = open_checkpoint(folder)
        self.spec = read_mtp(self.target.spec, source.names())
        where, dtype = self.target.device, self.target.dtype
        self.head = MTPHead(
            self.spec,
            self.target,
            attention=choose_backend("auto", self.spec.model, dtype, where),
            weight_format=open_weight_format("auto"),
        )
        self.head.load(source)
        model = self.head.cache_spec
        self.kv = KVCache(model, kv_groups(model), 32, 4, dtype, where)
        self.driver = Driver(self.target, block_size=4, num_blocks=32)

    def batch(self, tokens: list[int], following: list[int]) -> tuple[ForwardBatch, torch.Tensor]:
        """The target's step for these tokens, with those that follow them for the module, and its
        states."""
        batch = self.driver.batch({"r": tokens})
        states = self.target.forward(batch, self.driver.kv)
        ids = torch.tensor(following, device=self.target.device)
        return ForwardBatch(ids, batch.positions_T, batch.layout), states


def reference(
    rig: Rig, some: dict[str, torch.Tensor], states: torch.Tensor, following: list[int], num: int
) -> tuple[torch.Tensor, list[int]]:
    """Logits [T, V] given the target's states, then `num` greedy drafts of the module alone."""
    name = rig.spec.layout.name
    stem = stem_of(rig.spec.layout, rig.target.spec.num_layers)
    w = rig.target
    embedding, head = (m.parameters["weight"].cpu().float() for m in (w.embedding, w.lm_head))
    if name == "deepseek":
        states = rms(states, w.norm.weight_E.cpu())
    draft_tokens: list[int] = []
    first: torch.Tensor | None = None
    while True:
        tokens = embedding[torch.tensor([*following, *draft_tokens])]
        if name == "deepseek":
            both = (
                rms(tokens, some[f"{stem}enorm.weight"]),
                rms(states, some[f"{stem}hnorm.weight"]),
            )
            x = torch.cat(both, -1) @ some[f"{stem}eh_proj.weight"].T
            x = layer(x, some, stem, HEAD_DIM)
            normed = rms(x, some[f"{stem}shared_head.norm.weight"])
        else:
            token = rms(tokens, some[f"{stem}token_layernorm.weight"])
            state = rms(states, some[f"{stem}hidden_layernorm.weight"])
            x = torch.cat((state, token), -1) @ some[f"{stem}input_proj.weight"].T
            x = layer(x, some, stem, HEAD_DIM)
            x = normed = rms(x, some[f"{stem}final_layernorm.weight"])
        logits = normed @ head.T
        first = logits if first is None else first
        if len(draft_tokens) == num:
            return first, draft_tokens
        draft_tokens.append(int(logits[-1].argmax()))
        states = torch.cat((states, x[-1:]))


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("name", BY_NAME)
def test_it_says_what_the_formulas_say(name: str, kind: str, tmp_path: Path) -> None:
    """A prompt in two pieces, then drafts one by one, each from the state before."""
    some = random_tensors(names_of(BY_NAME[name], 2, has_bias=kind == "qwen2"), 5)
    rig = Rig(tmp_path, kind, some)
    assert rig.spec.layout.name == name
    tokens = some_tokens(11, 1)
    said, given, states = [], [], torch.empty(0)
    for begin, end in ((0, 7), (7, 10)):
        batch, hidden = rig.batch(tokens[begin:end], tokens[begin + 1 : end + 1])
        given.append(hidden.clone())
        states = rig.head.forward(rig.head.of_target(hidden[None]), batch, rig.kv)
        said.append(rig.head.logits(states))
    draft_tokens: list[int] = []
    state = states[-1:].clone()
    for _ in range(4):
        draft_tokens.append(int(rig.head.logits(state).argmax()))
        if len(draft_tokens) < 4:
            batch, _ = rig.batch([0], draft_tokens[-1:])  # the target's states are not used
            state = rig.head.forward(state, batch, rig.kv)
    wanted, chosen = reference(rig, some, torch.cat(given).cpu(), tokens[1:], 4)
    torch.testing.assert_close(torch.cat(said).cpu(), wanted, rtol=1e-4, atol=1e-4)
    assert draft_tokens == chosen
    assert rig.head.num_bytes == 4 * sum(tensor.numel() for tensor in some.values())


def test_biases_and_norms_of_heads_are_read() -> None:
    spec = read_spec(tiny_config(model_type="qwen3", attention_bias=True))
    roles = mtp_shapes(spec)
    assert {"q_bias", "k_bias", "v_bias", "o_bias", "q_norm", "k_norm"} <= roles.keys()
    assert not {"q_bias", "q_norm"} & mtp_shapes(read_spec(tiny_config())).keys()


def target_of(**changes: Any) -> ModelSpec:
    return read_spec(tiny_config(vocab_size=VOCAB, head_dim=HEAD_DIM, **changes))


def test_a_module_that_is_not_whole() -> None:
    names = list(names_of(BY_NAME["deepseek"], 2, has_bias=False))
    read_mtp(target_of(), names)
    with pytest.raises(ConfigError, match=r"lacks 'model.layers.2.hnorm.weight', and 0 more"):
        read_mtp(target_of(), [name for name in names if "hnorm" not in name])
    with pytest.raises(ConfigError, match="no MTP module 1"):
        read_mtp(target_of(), names, module=1)


def test_a_model_without_a_module() -> None:
    with pytest.raises(ConfigError, match="no MTP module 0; draft by ngram"):
        read_mtp(target_of(), ["model.norm.weight"])


def test_what_is_not_computed_is_said() -> None:
    with pytest.raises(ConfigError, match="gated attention and norms around one"):
        read_mtp(target_of(), ["mtp.fc.weight", "mtp.norm.weight"])
    names = ["model.layers.2.eh_proj.weight"]
    mixtral = target_of(
        model_type="mixtral",
        architectures=["MixtralForCausalLM"],
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    with pytest.raises(ConfigError, match="has experts"):
        read_mtp(mixtral, names)


def test_a_latent_module_is_said_to_be_one() -> None:
    """The layer of DeepSeek-V3 itself."""
    spec = deepseek()
    with pytest.raises(ConfigError, match="latent attention"):
        read_mtp(spec, [f"model.layers.{spec.num_layers}.eh_proj.weight"])


def test_a_tensor_of_another_shape(tmp_path: Path) -> None:
    some = random_tensors(names_of(BY_NAME["mimo"], 2, has_bias=False), 5)
    some["model.mtp_layers.0.input_proj.weight"] = torch.zeros(WIDTH, WIDTH)
    with pytest.raises(ConfigError, match=r"input_proj.weight has shape \(32, 32\)"):
        Rig(tmp_path, "llama", some)
