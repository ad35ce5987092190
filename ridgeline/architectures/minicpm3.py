"""What is a MiniCPM3? Latent attention, and multipliers: of the embedding, of what each branch
adds, and of the logits.

Source: Transformers `minicpm3`; arXiv 2404.06395, section 4, of the multipliers.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import dense, model_spec
from ridgeline.architectures.latent_config import LATENT_NAMES, latent_trunk
from ridgeline.architectures.spec import LatentSpec, ModelSpec


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    heads, width = config.integer("num_attention_heads"), config.integer("hidden_size")
    trunk, attention = latent_trunk(
        config,
        max_model_len,
        sizes=LatentSpec(256, 32, 64, max(1, width // heads), q_lora_rank=768),
        interleaved=False,
        max_positions=32768,
        norm_eps=1e-5,
    )
    spec = model_spec(
        config,
        trunk,
        family="minicpm3",
        attention=(attention,) * trunk.num_layers,
        feed_forward=dense(config),
        tensor_names=LATENT_NAMES,
        tied=True,
    )
    return replace(
        spec,
        embedding_scale=config.number("scale_emb", default=12.0, low=1e-6, high=1e6),
        residual_scale=config.number("scale_depth", default=1.4, low=1e-6, high=1e6)
        / sqrt(trunk.num_layers),
        logits_scale=config.integer("dim_model_base", default=256) / width,
    )
