"""Which models stand for all others while a machine is calibrated, and at which sizes?

Their weights are random: how long a product takes does not depend on the numbers in it. They have
few layers, because every layer costs the same, and widths between which most models lie.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ridgeline.architectures import read_spec
from ridgeline.architectures.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Sample:
    """A model shape. `prefills` and `decodes` (requests, context) are the whole steps that are
    measured with it, `mixes` are (prompt tokens, requests that decode, their context), `checks`
    (requests, context, drafts of each). `drafts` are such steps in which the model's first layers
    draft, timed on a device that has a clock of its own. `answers` (number, tokens of the
    prompt) are timed whole, one after the other. Without `has_operators` it is for these alone."""

    name: str
    config: Mapping[str, Any]
    prefills: tuple[int, ...]
    decodes: tuple[tuple[int, int], ...]
    mixes: tuple[tuple[int, int, int], ...] = ()
    checks: tuple[tuple[int, int, int], ...] = ()
    drafts: tuple[tuple[int, int, int], ...] = ()
    answers: tuple[int, int] = (0, 0)
    has_operators: bool = True

    @property
    def spec(self) -> ModelSpec:
        return read_spec(dict(self.config))

    def write(self, folder: Path) -> None:
        """A model folder without weights."""
        text = json.dumps(dict(self.config), indent=1)
        (folder / "config.json").write_text(text, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Grid:
    """What is measured. `tokens` are numbers of rows of matrix products and elementwise passes,
    `decodes` (requests, context), `prefills` (new tokens, tokens before), `mixes` as in Sample;
    attention is measured on the shapes `attention` (heads, KV heads, head size)."""

    samples: tuple[Sample, ...]
    tokens: tuple[int, ...]
    attention: tuple[tuple[int, int, int], ...]
    decodes: tuple[tuple[int, int], ...]
    skewed: tuple[tuple[int, ...], ...]
    prefills: tuple[tuple[int, int], ...]
    mixes: tuple[tuple[int, int, int], ...]
    hosts: tuple[int, ...]
    max_call_s: float
    looks: int = 2  # at steps of small models


def config(
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    inner: int,
    vocabulary: int,
    *,
    family: str = "llama",
    head_dim: int | None = None,
    tied: bool = True,
) -> dict[str, Any]:
    """The config.json of a model with these sizes."""
    return {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim or hidden // heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }


CPU = Grid(
    samples=(
        Sample(
            "small",
            config(384, 6, 6, 2, 1024, 4096),
            prefills=(24, 40, 96, 160, 384, 640, 1536),
            decodes=(
                *((1, 96), (1, 400), (1, 1536), (3, 400), (4, 96), (5, 1400), (8, 128)),
                *((8, 1024), (16, 512), (20, 96), (24, 256), (24, 1280)),
            ),
            mixes=((64, 8, 256), (200, 16, 128), (512, 8, 512)),
        ),
        Sample(
            "medium",
            config(768, 4, 12, 4, 2048, 32000),
            prefills=(24, 40, 96, 160, 384, 640, 1536),
            decodes=(
                *((1, 96), (1, 400), (1, 1536), (3, 400), (4, 96), (5, 1400), (8, 128)),
                *((8, 1024), (16, 512), (20, 96), (24, 256), (24, 1280)),
            ),
            mixes=((64, 8, 256), (128, 8, 512)),
        ),
    ),
    tokens=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048),
    attention=((6, 2, 64), (12, 4, 64)),
    decodes=tuple((b, s) for b in (1, 4, 16, 32) for s in (64, 256, 1024, 2048)),
    skewed=((1800, 100, 100, 100), (900, 900, 60, 60, 60, 60, 60, 60), (2000, *(128,) * 15)),
    prefills=((16, 0), (64, 0), (256, 0), (1024, 0), (2048, 0), (64, 512), (256, 1024), (512, 512)),
    mixes=((64, 8, 256), (256, 16, 256), (512, 4, 1024), (128, 24, 128)),
    hosts=(1, 4, 16, 64),
    max_call_s=0.12,
)

CPU_QUICK = Grid(
    samples=(
        Sample(
            "small",
            config(384, 3, 6, 2, 1024, 4096),
            prefills=(24, 96, 384),
            decodes=((1, 96), (1, 1024), (4, 256), (16, 128), (16, 512)),
            mixes=((64, 8, 256),),
        ),
        Sample(
            "medium",
            config(768, 2, 12, 4, 2048, 8192),
            prefills=(24, 96, 384),
            decodes=((1, 96), (1, 1024), (4, 256), (16, 256)),
        ),
    ),
    tokens=(1, 4, 16, 64, 256, 1024),
    attention=((6, 2, 64), (12, 4, 64)),
    decodes=((1, 64), (1, 1024), (8, 128), (8, 512), (32, 64), (32, 512)),
    skewed=((1000, 60, 60, 60),),
    prefills=((16, 0), (64, 0), (256, 0), (1024, 0), (256, 256)),
    mixes=((64, 8, 256), (256, 4, 256)),
    hosts=(1, 16),
    max_call_s=0.05,
)

_QWEN_LIKE = config(1024, 28, 16, 8, 3072, 151936, family="qwen3", head_dim=128)
_LLAMA_LIKE = config(4096, 16, 32, 8, 14336, 128256, tied=False)

# Kernels were tuned for the two above, but not for these, which are also too small for the rule
# that cuts what was not tuned (`kernels.untuned_tiles`): such products are the library's. The last
# has so little to do that its steps wait for the host; what is once in each step or pass is seen by
# it, and what is in each layer by the others. Of the second all is still in the last cache when it
# is read again.
_SMALL = config(768, 8, 12, 4, 2048, 32000)
_CACHED = Sample(
    "in the cache",
    config(320, 6, 5, 1, 1024, 4096),
    prefills=(24, 384),
    decodes=((1, 256), (8, 256), (32, 256)),
    checks=((1, 256, 4), (8, 256, 2), (32, 256, 4)),
    drafts=((1, 256, 3), (8, 256, 4), (32, 256, 2)),
    has_operators=False,
)
_LEAST = config(256, 2, 4, 2, 768, 4096)
_HOST_BOUND = Sample(
    "the least",
    _LEAST,
    prefills=(24, 384),
    decodes=((1, 128), (4, 128), (16, 256), (64, 128), (160, 256)),
    checks=((1, 128, 1), (4, 128, 2), (16, 256, 1), (64, 128, 2), (128, 128, 1)),
    drafts=((1, 128, 1), (1, 256, 4), (1, 128, 8), (4, 128, 2), (16, 256, 3), (128, 128, 1)),
    answers=(24, 48),
    has_operators=False,
)

CUDA = Grid(
    samples=(
        Sample(
            "0.6B",
            _QWEN_LIKE,
            prefills=(24, 128, 768, 3072, 8192),
            decodes=((1, 256), (2, 4096), (8, 512), (32, 1024), (64, 256), (64, 3000), (160, 700)),
            mixes=((512, 16, 1024), (2048, 64, 512)),
            checks=((1, 256, 1), (1, 256, 4), (4, 1024, 3), (8, 512, 7), (32, 1024, 2)),
            drafts=((1, 256, 1), (1, 256, 4), (3, 512, 3), (32, 1024, 2)),
        ),
        Sample(
            "8B, half of its layers",
            _LLAMA_LIKE,
            prefills=(24, 128, 384, 768, 3072, 8192),
            decodes=((1, 256), (2, 4096), (8, 512), (32, 1024), (64, 256), (64, 3000), (160, 700)),
            mixes=((512, 16, 1024), (2048, 64, 512)),
        ),
        Sample(
            "small",
            _SMALL,
            prefills=(24, 384, 1536),
            decodes=((1, 256), (3, 128), (8, 512), (24, 1024), (64, 256), (160, 700)),
            checks=((1, 256, 1), (1, 256, 2), (1, 512, 4), (1, 256, 7), (8, 512, 4), (32, 256, 2)),
            drafts=((1, 256, 1), (1, 512, 2), (1, 256, 6), (1, 256, 8), (8, 512, 4), (64, 256, 3)),
        ),
        _CACHED,
        _HOST_BOUND,
    ),
    tokens=(1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192),
    attention=((16, 8, 128), (32, 8, 128)),
    decodes=tuple((b, s) for b in (1, 8, 32, 128) for s in (256, 1024, 4096, 16384)),
    skewed=((16384, 256, 256, 256), (4096, 4096, *(200,) * 6), (8192, *(512,) * 15)),
    prefills=(
        *((n, before) for n in (64, 256, 1024, 4096) for before in (0, 4096)),
        (8192, 0),
        (16, 1024),
        (2048, 16384),
    ),
    mixes=tuple((n, b, s) for n in (64, 512, 2048) for b, s in ((8, 1024), (64, 512), (128, 2048))),
    hosts=(1, 16, 64, 256),
    max_call_s=0.2,
)

CUDA_QUICK = Grid(
    samples=(
        Sample(
            "0.6B", _QWEN_LIKE, prefills=(24, 768, 4096), decodes=((1, 256), (8, 1024), (64, 512))
        ),
        Sample(
            "8B, a quarter of its layers",
            {**_LLAMA_LIKE, "num_hidden_layers": 8},
            prefills=(24, 768, 4096),
            decodes=((1, 256), (8, 1024), (64, 512)),
            mixes=((512, 16, 1024),),
        ),
        Sample(
            "small",
            _SMALL,
            prefills=(24, 384),
            decodes=((1, 256), (8, 512), (64, 256)),
            checks=((1, 256, 1), (1, 256, 4), (8, 512, 4)),
            drafts=((1, 256, 2), (1, 256, 6), (64, 256, 3)),
        ),
        _HOST_BOUND,
    ),
    tokens=(1, 8, 64, 128, 256, 512, 2048, 8192),
    attention=((16, 8, 128), (32, 8, 128)),
    decodes=((1, 256), (1, 8192), (16, 512), (16, 4096), (128, 256), (128, 2048)),
    skewed=((8192, 256, 256, 256),),
    prefills=((64, 0), (512, 0), (4096, 0), (512, 4096)),
    mixes=((512, 16, 1024), (1024, 64, 512)),
    hosts=(1, 64),
    max_call_s=0.1,
    looks=1,
)


def grid_for(device_type: str, *, is_quick: bool) -> Grid:
    """What to measure on a "cpu" or "cuda" device."""
    if device_type == "cuda":
        return CUDA_QUICK if is_quick else CUDA
    return CPU_QUICK if is_quick else CPU
