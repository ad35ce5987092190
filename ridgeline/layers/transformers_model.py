"""How does a model run whose family has no file in `architectures`? Transformers' modules compute
its layers; cache, attention, scheduling and sampling are ours. No code of the checkpoint is run.

That is right only for a plain decoder: each layer attends once, causally, by Transformers' own
interface, and nothing else looks at other tokens. `foreign_spec` asks the modules for that without
weights, and `load` compares packed and cached steps with Transformers' own answer.

Letters: T packed tokens, H query heads, K KV heads, D head size, E hidden, V vocabulary, R rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ridgeline.architectures.config_reader import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
)
from ridgeline.architectures.family import DTYPES
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.architectures.parts import LLAMA_NAMES, parts
from ridgeline.architectures.spec import (
    TRANSFORMERS,
    AttentionSpec,
    DenseSpec,
    LayerSpec,
    ModelSpec,
    RopeSpec,
)
from ridgeline.attention.backend import AttentionBackend
from ridgeline.attention.layout import AttentionLayout, ForwardBatch
from ridgeline.distributed.placement import Placement
from ridgeline.errors import ConfigError
from ridgeline.kvcache import KVCache
from ridgeline.layers.decoder import Decoder

ATTENTION = "ridgeline"  # the name of `_attend` in Transformers' table
EXTRA = "transformers"  # of our package
# Given to attention beside queries, keys and values, without a meaning for its result here.
HARMLESS = {"cache_position", "dropout", "is_causal", "position_ids", "return_dict"}
# Their frequencies follow the longest request of a step, which would change the others' answers.
SHARED_ROPES = ("dynamic", "longrope")
# Modules are made for each layer, and tables for each token, before anything is known of files.
BOUNDS = {
    "num_hidden_layers": MAX_LAYERS,
    "num_attention_heads": MAX_HEADS,
    "vocab_size": MAX_VOCAB,
    "max_position_embeddings": MAX_POSITIONS,
}
PROBED = 3  # tokens
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}  # of the largest logit

Attend = Callable[["_Call"], torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Call:
    """One layer's question: q [H, T, D], k and v [K, T, D]."""

    layer: int
    q_HTD: torch.Tensor
    k_KTD: torch.Tensor
    v_KTD: torch.Tensor
    scale: float | None
    window: int | None
    others: tuple[str, ...]  # what else was asked for


class _Current:
    """Who answers the layers of one model at this moment."""

    def __init__(self) -> None:
        self.attend: Attend | None = None

    @contextmanager
    def answering(self, attend: Attend) -> Iterator[None]:
        self.attend = attend
        try:
            yield
        finally:
            self.attend = None


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' interface of attention: [1, H, T, D] in, [1, T, H, D] out."""
    asked = {name for name, given in others.items() if given is not None and given is not False}
    more = sorted(asked - HARMLESS)
    if attention_mask is not None:
        more.append("attention_mask")
    if not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        more.append("attention to later tokens")
    call = _Call(module.layer_idx, query[0], key[0], value[0], scaling, sliding_window, tuple(more))
    return module.ridgeline_current.attend(call)[None], None


def _library() -> Any:
    """ConfigError when it is not installed."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "implementation transformers needs the package transformers, which cannot be imported "
            f"({error}); pip install 'ridgeline[{EXTRA}]'"
        ) from error
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    transformers.AttentionInterface.register(ATTENTION, _attend)
    return transformers


def _config(folder: Path, model_type: str) -> Any:
    configs = _library().AutoConfig
    with _blaming(folder, f"Transformers does not read a model_type {model_type[:60]!r}"):
        return configs.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def _refused(folder: Path, reason: str) -> ConfigError:
    """In one line, as the library's own words may hold anything."""
    words = "".join(c for c in " ".join(reason.split()) if c.isprintable())
    return ConfigError(f"{folder}: {words[:400]}; no implementation of this version serves it")


# ------------------------------------------------------------------------ what it is


def foreign_spec(folder: Path, model_type: str) -> ModelSpec:
    """What Transformers makes of a model's config.json, asked of its modules without weights.

    Each layer is described as a dense one with as many numbers as the modules have on average, so
    memory is exact, and experts are priced as if all were computed. ConfigError if it is no plain
    decoder, or Transformers does not know it either."""
    config = _config(folder, model_type)
    text = config.get_text_config()
    for name, most in BOUNDS.items():
        if not 0 < (value := getattr(text, name, None) or 1) <= most:
            raise _refused(folder, f"{name} is {value}; it must be between 1 and {most}")
    rope = (getattr(text, "rope_parameters", None) or {}).get("rope_type")
    if rope in SHARED_ROPES:
        raise _refused(folder, f"its positions ({rope}) depend on the longest request of a step")
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int):
        raise _refused(folder, "config.json has no max_position_embeddings")
    model = _without_weights(folder, config)
    calls = _probed(folder, model, text.num_hidden_layers)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None:
        raise _refused(folder, "it has no embedding or no matrix that makes logits")
    is_tied = head.weight is embedding.weight
    vocab_size, width = head.weight.shape
    attention = [_attention(folder, call) for call in calls]
    both = (1 if is_tied else 2) * vocab_size * width + width
    numbers = sum(parameter.numel() for parameter in model.parameters()) - both
    share, rest = divmod(numbers, len(attention))
    layers = [_layer(one, width, share) for one in attention]
    layers[0] = replace(layers[0], unlisted=layers[0].unlisted + rest)
    dtype = str(getattr(config, "dtype", None) or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise _refused(folder, f"dtype is {dtype}; supported are {', '.join(DTYPES)}")
    return ModelSpec(
        family=config.model_type,
        vocab_size=vocab_size,
        hidden_size=width,
        layers=tuple(layers),
        norm_eps=0.0,
        tie_embeddings=is_tied,
        max_position_embeddings=positions,
        dtype=dtype,
        tensor_names=LLAMA_NAMES,
        bos_token_id=text.bos_token_id if isinstance(text.bos_token_id, int) else None,
        eos_token_ids=_ids(text.eos_token_id),
        implementation=TRANSFORMERS,
    )


def _ids(given: object) -> tuple[int, ...]:
    several = given if isinstance(given, list | tuple) else [given]
    return tuple(one for one in several if isinstance(one, int))


def _without_weights(folder: Path, config: Any) -> Any:
    """In bfloat16, which the products of experts ask for where there are no numbers."""
    models = _library().AutoModelForCausalLM
    with _blaming(folder, "Transformers makes no model of it"), torch.device("meta"):
        return models.from_config(
            config,
            attn_implementation=ATTENTION,
            dtype=torch.bfloat16,
            trust_remote_code=False,
        ).eval()


@contextmanager
def _blaming(folder: Path, what: str) -> Iterator[None]:
    """Modules that nobody here knows may raise anything: ConfigError with it."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise _refused(folder, f"{what}: {type(error).__name__}: {error}") from error


def _probed(folder: Path, model: Any, num_layers: int) -> list[_Call]:
    """What each layer asks of attention."""
    calls: list[_Call] = []

    def note(call: _Call) -> torch.Tensor:
        calls.append(call)
        heads, tokens, _ = call.q_HTD.shape
        return call.q_HTD.new_empty(tokens, heads, call.v_KTD.shape[-1])

    with (
        _blaming(folder, "its modules cannot be asked without weights"),
        torch.inference_mode(),
        _join(model).answering(note),
        torch.device("meta"),
    ):
        ids = torch.zeros(PROBED, dtype=torch.int64)
        _states(model.get_decoder(), ids, torch.arange(PROBED))
    if [call.layer for call in calls] != list(range(num_layers)):
        raise _refused(folder, "not each of its layers attends once by Transformers' interface")
    return calls


def _join(model: Any) -> _Current:
    """Every module that attends asks the same one."""
    current = _Current()
    for module in model.modules():
        if getattr(module, "layer_idx", None) is not None:
            module.ridgeline_current = current
    return current


def _states(layers: Any, ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
    """Behind the final norm, [T, E]."""
    out = layers(
        input_ids=ids_T[None], position_ids=positions_T[None], use_cache=False, return_dict=True
    )
    states: torch.Tensor = out.last_hidden_state[0]
    return states


def _attention(folder: Path, call: _Call) -> AttentionSpec:
    (heads, _, size), (kv_heads, _, value_size) = call.q_HTD.shape, call.v_KTD.shape
    if call.others:
        raise _refused(folder, f"its attention needs {', '.join(sorted(set(call.others)))}")
    if size != value_size:
        raise _refused(folder, f"its keys have {size} numbers and its values {value_size}")
    return AttentionSpec(heads, kv_heads, size, RopeSpec(), window=call.window, scale=call.scale)


def _layer(attention: AttentionSpec, width: int, numbers: int) -> LayerSpec:
    """A layer of so many numbers; those that make no whole row of a feed-forward are unlisted."""
    least = LayerSpec(attention, DenseSpec(1))
    left = numbers - _numbers(least, width)
    layer = LayerSpec(attention, DenseSpec(1 + max(0, left // (3 * width))))
    return replace(layer, unlisted=numbers - _numbers(layer, width))


def _numbers(layer: LayerSpec, width: int) -> int:
    return sum(part.num_numbers for part in parts(layer, width))


# ------------------------------------------------------------------------ how it runs


class TransformersDecoder(Decoder):
    """A `Decoder` whose layers are Transformers' modules; `spec` is `foreign_spec`'s. Its hidden
    states are those behind the final norm."""

    not_captured = "Transformers' modules may wait for the host"

    def __init__(
        self,
        spec: ModelSpec,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: torch.device,
        attention: AttentionBackend,
        max_model_len: int,
    ) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        self.placement, self.backend, self.max_model_len = Placement(), attention, max_model_len
        self.deterministic, self.num_token_ids, self.layers = False, spec.vocab_size, []
        self._folder = folder

    def load_folder(self, *, is_random: bool, seed: int) -> None:
        """Weights from the folder's safetensors, or random ones. ConfigError for a tensor that is
        missing, of another shape or that nobody needs, and for a model that is no plain decoder
        after all."""
        models = _library().AutoModelForCausalLM
        if is_random:
            torch.manual_seed(seed)
            with torch.device(self.device):
                model = models.from_config(
                    _config(self._folder, self.spec.family),
                    attn_implementation=ATTENTION,
                    dtype=self.dtype,
                )
        else:
            model = self._read(models)
        self._model = model.to(self.device).eval()
        self._layers = model.get_decoder()
        modules = self._model.named_modules()
        self._place = next(name for name, module in modules if module is self._layers)
        self._current = _join(self._model)
        with _blaming(self._folder, "it is no plain decoder"):
            self._check()

    def _read(self, models: Any) -> Any:
        with _blaming(self._folder, "Transformers does not load it"):
            model, found = models.from_pretrained(
                self._folder,
                attn_implementation=ATTENTION,
                dtype=self.dtype,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
        for what in ("missing", "mismatched", "unexpected"):
            if names := found[f"{what}_keys"]:
                first = str(sorted(map(str, names))[0])
                raise _refused(self._folder, f"{len(names)} {what} tensors, such as {first}")
        return model

    @property
    def num_bytes(self) -> int:
        return sum(one.numel() * one.element_size() for one in self._model.parameters())

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        states_TE = self._forward_all(batch, kv)
        wanted = batch.logits_indices
        return states_TE if wanted is None else states_TE.index_select(0, wanted.rows_R)

    def _forward_all(self, batch: ForwardBatch, kv: KVCache) -> torch.Tensor:
        layout = batch.layout
        if not isinstance(layout, AttentionLayout):
            raise TypeError("a captured step reached modules that cannot be captured")
        plans = [self.backend.plan(layout, i, group.window) for i, group in enumerate(kv.groups)]

        def attend(call: _Call) -> torch.Tensor:
            layer_kv = kv.layers[call.layer]
            kv_TKD = torch.cat((call.k_KTD, call.v_KTD)).transpose(0, 1)
            layer_kv.write(layout.slots_T[layer_kv.group], kv_TKD.flatten(1))
            spec = self.spec.layers[call.layer].attention
            q_THD = call.q_HTD.transpose(0, 1).contiguous()
            return self.backend.attend(q_THD, layer_kv, plans[layer_kv.group], spec)

        with self._current.answering(attend):
            return _states(self._layers, batch.token_ids_T, batch.positions_T)

    @torch.inference_mode()
    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """By the model's own head, with whatever it scales or caps: the layers before it are
        replaced by their result."""
        self._model.set_submodule(self._place, _Given(hidden_RE))
        try:
            ids = torch.zeros(1, len(hidden_RE), dtype=torch.int64, device=self.device)
            logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._model.set_submodule(self._place, self._layers)
        return logits.float()

    def _check(self) -> None:
        """One request in two chunks, the second beside another request, against Transformers' own
        answer to each alone. ConfigError if they differ."""
        where, size = self.device, 16
        ids = torch.arange(12, device=where) * 7919 % self.spec.vocab_size
        first, second = ids[:8], ids[8:]
        kv = KVCache(
            self.spec, kv_groups(self.spec), 2 * len(kv_groups(self.spec)), size, self.dtype, where
        )
        head = self._piece(first[:5], [0], [5], kv, size)
        tail = self._piece(torch.cat((first[5:], second)), [5, 0], [3, 4], kv, size)
        got = self.logits(torch.cat((head, tail)))
        want = torch.cat([self._alone(one) for one in (first, second)])
        difference = (got - want).abs().max() / want.abs().max()
        if not difference <= TOLERANCE[self.dtype]:
            raise _refused(
                self._folder,
                "it is no plain decoder: in chunks, beside others, its logits differ from "
                f"Transformers' own by {difference:.1g} of the largest",
            )

    def _piece(
        self, ids_T: torch.Tensor, starts: list[int], lens: list[int], kv: KVCache, size: int
    ) -> torch.Tensor:
        """Hidden states of a step of requests, each of which has one block in each group."""
        groups, where = range(len(kv.groups)), self.device
        ranges = [torch.arange(s, s + n, device=where) for s, n in zip(starts, lens, strict=True)]
        rows = range(len(starts))
        blocks = [[1 + group * 2 + row for row in rows] for group in groups]
        layout = AttentionLayout(
            lens,
            [s + n for s, n in zip(starts, lens, strict=True)],
            [0, *torch.tensor(lens).cumsum(0).tolist()],
            tuple(torch.tensor(b, dtype=torch.int32, device=where)[:, None] for b in blocks),
            tuple(torch.cat([b[row] * size + ranges[row] for row in rows]) for b in blocks),
            size,
        )
        return self.forward(ForwardBatch(ids_T, torch.cat(ranges), layout), kv)

    @torch.inference_mode()
    def _alone(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Transformers' logits of one request, by its own attention."""
        self._model.set_attn_implementation("eager")
        try:
            logits: torch.Tensor = self._model(input_ids=ids_T[None], use_cache=False).logits[0]
        finally:
            self._model.set_attn_implementation(ATTENTION)
        return logits.float()


class _Given(torch.nn.Module):
    """Stands for layers whose hidden states are known, [R, E]."""

    def __init__(self, hidden_RE: torch.Tensor) -> None:
        super().__init__()
        self._states = _States(hidden_RE[None])

    def forward(self, *_: Any, **__: Any) -> _States:
        return self._states


@dataclass(frozen=True, slots=True)
class _States:
    """What Transformers' layers return, with nothing but the hidden states in it."""

    last_hidden_state: torch.Tensor

    def __getitem__(self, place: int) -> torch.Tensor:
        return (self.last_hidden_state,)[place]

    def __getattr__(self, name: str) -> None:
        return None
