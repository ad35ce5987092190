"""What did others ask for devices and for tokens, and what is each engine for? With their sources.

Pages that tell no date of their own have that on which they were read. Whatever no page tells is
assumed, and says so.
"""

from __future__ import annotations

import msgspec

READ = "read 2026-11-28"
ASSUMED = "assumed 2026-11-28: put in yours"


class Asked(msgspec.Struct, frozen=True):
    """A price: dollars, or dollars for a million prompt and answer tokens."""

    what: str
    low: float
    high: float
    unit: str
    source: str
    date: str


H100_SERVER = 317_000.0  # of eight, with their network cards
API = (0.22, 0.22)  # the middle one of those below, by prompt tokens
KWH, YEARS = 0.15, 4.0

# fmt: off
PRICES = (
    Asked("eight H100 SXM in a server", H100_SERVER, H100_SERVER, "$",
          "Thinkmate's quotation (archived), by a public sheet of H100 cluster costs", "2024-08"),
    Asked("a H100 SXM alone, new", 25_000, 30_000, "$", "awesomeagents.ai/hardware/nvidia-h100",
          READ),
    Asked("a H100 by form and month", 25_000, 40_000, "$",
          "stratrix.com, why H100 GPUs command such pricing", READ),
    Asked("a DGX H100, list, without support", 199_000, 199_000, "$",
          "supercluster.blog, NVIDIA DGX platform", READ),
    Asked("Llama-3.1-8B: DeepInfra", 0.03, 0.05, "$/1M in, out", "cloudprice.net", READ),
    Asked("Llama-3.1-8B: Databricks", 0.15, 0.45, "$/1M in, out", "cloudprice.net", READ),
    Asked("Llama-3.1-8B: Amazon Bedrock", 0.22, 0.22, "$/1M in, out", "cloudprice.net", READ),
    Asked("Llama-3.1-8B: Cloudflare", 0.282, 0.827, "$/1M in, out", "cloudprice.net", READ),
    Asked("Llama-3.1-8B: Azure", 0.30, 0.61, "$/1M in, out", "cloudprice.net", READ),
    Asked("Llama-3.3-70B in FP8: DeepInfra", 0.13, 0.40, "$/1M in, out",
          "deepinfra.com, Llama-3.3-70B-Instruct-Turbo", READ),
    Asked("Llama-3.3-70B: Tera", 0.72, 0.72, "$/1M in, out", "docs.tera.gw", READ),
    Asked("electricity", KWH, KWH, "$/kWh", "none", ASSUMED),
    Asked("use of a device until it is replaced", YEARS, YEARS, "years", "none", ASSUMED),
    Asked("a RTX 4090 with its share of a computer", 2500, 2500, "$", "none", ASSUMED),
)

# "for" and "take another for" are judgements of this page, the others what the sources say.
ENGINES = (
    ("vLLM", "the usual choice in data centres: most models, and new ones soon",
     "NVIDIA, AMD and Intel GPUs, CPUs; TPU, Gaudi, Ascend and others by plugins of their own",
     "tensor, pipeline, data and expert parallel, many nodes",
     "a single user on a laptop",
     f"README and docs.vllm.ai, Installation, {READ}"),
    ("TensorRT-LLM", "the most out of the newest NVIDIA cards, FP8 and FP4; it runs from PyTorch"
     " alone, as building engines was removed",
     "NVIDIA GPUs", "tensor, pipeline, expert and context parallel, many nodes",
     "any other vendor's hardware",
     f"nvidia.github.io/TensorRT-LLM: overview of 1.3, migration guide, {READ}"),
    ("TGI", "installations that exist; in maintenance mode since December 2025",
     "NVIDIA, AMD, Intel GPU, Gaudi, TPU, Inferentia", "tensor parallel",
     "a new installation",
     "README of huggingface/text-generation-inference, changed 2025-12-11"),
    ("llama.cpp", "one or a few people on any machine: laptops, Apple silicon, a card with too"
     " little memory beside its CPU; GGUF files of 1.5 to 8 bits",
     "CPU, Apple, NVIDIA, AMD, Intel, Ascend and others",
     "layers or rows over the cards of a machine, other machines by RPC",
     "hundreds of users at once", f"README of ggml-org/llama.cpp, {READ}"),
    ("Ridgeline", "to know before and to understand afterwards: every step has a price, plans and"
     " commands come from it, and each decision is explained",
     "NVIDIA, CPU", "tensor parallel, and replicas behind a router",
     "hardware of other vendors, and the newest models", "this version"),
)
# fmt: on
