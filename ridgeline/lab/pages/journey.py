"""What happens to a prompt, from text to text? The bundled model's own numbers, step by step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from ridgeline import demo
from ridgeline.architectures.counts import kv_bytes, num_parameters, step_flops
from ridgeline.errors import RequestFault
from ridgeline.figures import count, memory, percent, scaled
from ridgeline.lab.page import Answer, Figure, Guess, Page, Preset, Question, Table, control
from ridgeline.request import SamplingParams

if TYPE_CHECKING:
    from ridgeline.text.chat import ChatTemplate
    from ridgeline.text.tokenizer import Tokenizer
    from ridgeline.traced import TracedModel

STEPS = ("1 tokens", "2 embeddings", "3 attention", "4 logits", "5 sampling", "6 text", "7 stop")
MAX_TOKENS = 160
SHOWN_NUMBERS, SHOWN_CANDIDATES = 48, 12  # of an embedding, of all tokens
TRACE = "ridgeline.traced.TracedModel.read"


class Inputs(msgspec.Struct, frozen=True):
    step: Annotated[str, control("step", "of the way through", choices=STEPS)] = "3 attention"
    text: Annotated[str, control("prompt", length=300)] = "What is 17 plus 25?"
    temperature: Annotated[float, control("temperature", ge=0, le=2, step=0.05)] = 0.8
    top_p: Annotated[float, control("top-p", ge=0.05, le=1, step=0.05)] = 1.0
    layer: Annotated[int, control("layer", ge=1, le=6)] = 5
    head: Annotated[int, control("head", ge=1, le=6)] = 1
    at: Annotated[
        int, control("answer token", "whose row is looked at", ge=0, le=31, is_folded=True)
    ] = 0
    chat: Annotated[
        bool, control("as a question", "in the model's chat template", is_folded=True)
    ] = True
    top_k: Annotated[int, control("top-k", "0: off", ge=0, le=50, is_folded=True)] = 0
    longest: Annotated[
        int, control("longest answer", ge=1, le=32, unit="tokens", is_folded=True)
    ] = 16
    seed: Annotated[int, control("seed", ge=0, le=9999, is_folded=True)] = 1


class Piece(msgspec.Struct, frozen=True):
    """A token; `is_special`: it stands for no text."""

    id: int
    text: str
    is_special: bool


class Candidate(msgspec.Struct, frozen=True):
    """A token that might follow: its logit, its probability as the model says it, and that which is
    drawn from."""

    id: int
    text: str
    logit: float
    probability: float
    drawn_from: float


class Said(msgspec.Struct, frozen=True):
    """A token of the answer, with its probability, and the text that it gave."""

    id: int
    text: str
    probability: float
    gave: str


class LayerSays(msgspec.Struct, frozen=True):
    """What the states in front of (or behind) a layer would say next."""

    layer: int
    text: str
    probability: float


class Drawing(msgspec.Struct, frozen=True):
    """`weights`: rows of the layer's head over the prompt; `row`: that of the pass that chose
    answer token `at`, over `seen` tokens. `peaks`: the largest of a row, of each head."""

    pieces: list[Piece]
    width: int
    vectors: list[list[float]]
    weights: list[list[float]]
    row: list[float]
    peaks: list[list[float]]
    seen: list[Piece]
    by_layer: list[LayerSays]
    candidates: list[Candidate]
    num_drawn_from: int
    at: int
    said: list[Said]
    text: str
    reason: str
    stop: str


@dataclass(frozen=True, slots=True)
class _Chosen:
    """One pass: the token that came out, and where the last token looked."""

    token: int
    probability: float
    candidates: list[Candidate]
    num_drawn_from: int
    by_layer: list[LayerSays]
    rows: Any  # [layers, heads, n]


@dataclass(frozen=True, slots=True)
class _Told:
    token_ids: list[int]
    embeddings: Any  # [T, E]
    weights: tuple[Any, ...]  # by layer [H, T, T]
    chosen: list[_Chosen]


@dataclass(frozen=True, slots=True)
class _Parts:
    model: TracedModel
    tokenizer: Tokenizer
    template: ChatTemplate
    lock: Lock


@cache
def _parts() -> _Parts:
    """The bundled model, loaded when somebody first looks at it."""
    from ridgeline.text.chat import load_chat_template
    from ridgeline.text.tokenizer import load_tokenizer
    from ridgeline.traced import TracedModel

    folder = demo.folder()
    tokenizer = load_tokenizer(folder)
    template = load_chat_template(folder, tokenizer)
    if tokenizer is None or template is None:
        raise RequestFault("the bundled model lacks its tokenizer or its template")
    return _Parts(TracedModel(folder, MAX_TOKENS), tokenizer, template, Lock())


# ------------------------------------------------------------------------ running the model


def answer(inputs: Inputs) -> Iterator[float | Answer[Drawing]]:
    for told in _tell(inputs):
        yield told if isinstance(told, float) else _answer(inputs, _parts(), told)


_KNOWN: dict[Inputs, _Told] = {}


def _tell(inputs: Inputs) -> Iterator[float | _Told]:
    parts = _parts()
    asked = msgspec.structs.replace(inputs, step=STEPS[0], layer=1, head=1, at=0)  # all that counts
    if (known := _KNOWN.get(asked)) is not None:
        yield known
        return
    token_ids = _prompt(parts, inputs)
    with parts.lock:
        first = parts.model.read(token_ids)
        embeddings, weights = first.states_LTE[0].clone(), first.weights
        chosen, now = [_choose(parts, inputs, first, len(token_ids))], list(token_ids)
        ends = set(parts.model.spec.eos_token_ids)
        while chosen[-1].token not in ends and len(chosen) < inputs.longest:
            yield len(chosen) / inputs.longest
            now.append(chosen[-1].token)
            one = parts.model.read(now[-1:], len(now) - 1)
            chosen.append(_choose(parts, inputs, one, len(now)))
    told = _Told(token_ids, embeddings, weights, chosen)
    if len(_KNOWN) >= 32:
        _KNOWN.clear()
    _KNOWN[asked] = told
    yield told


def _prompt(parts: _Parts, inputs: Inputs) -> list[int]:
    if not inputs.text.strip():
        raise RequestFault("text is empty; write a prompt", param="text", code="empty_input")
    if inputs.chat:
        token_ids = parts.template.encode_chat([{"role": "user", "content": inputs.text}])
    else:
        token_ids = parts.tokenizer.encode(inputs.text)
    most = MAX_TOKENS - inputs.longest
    if len(token_ids) > most:
        raise RequestFault(
            f"text is {len(token_ids)} tokens; with an answer of {inputs.longest} at most {most} "
            "are traced. Shorten it",
            param="text",
        )
    return token_ids


def _choose(parts: _Parts, inputs: Inputs, one: Any, position: int) -> _Chosen:
    """By the engine's own sampler."""
    import numpy as np
    import torch

    from ridgeline.sampling.batch import build_batch
    from ridgeline.sampling.row import sampling_row
    from ridgeline.sampling.sampler import probabilities, sample

    params = SamplingParams(
        temperature=inputs.temperature, top_p=inputs.top_p, top_k=inputs.top_k, seed=inputs.seed,
        max_tokens=inputs.longest,
    )  # fmt: skip
    logits_1V = one.logits_LV[-1:]
    batch = build_batch([sampling_row("0", params, 0)], logits_1V.shape[1], torch.from_numpy)
    at = np.array([position])
    token = int(sample(logits_1V, batch, torch.from_numpy(at), at).token_ids_R[0])
    said_V, drawn_V = logits_1V[0].softmax(-1), probabilities(logits_1V, batch)[0]
    best = logits_1V[0].topk(SHOWN_CANDIDATES).indices.tolist()
    if token not in best:
        best[-1] = token
    three = torch.stack([logits_1V[0], said_V, drawn_V], dim=1)[best].tolist()
    candidates = [
        Candidate(i, _visible(parts, i), *row) for i, row in zip(best, three, strict=True)
    ]
    layers_LV = one.logits_LV.softmax(-1)
    by_layer = [
        LayerSays(layer, _visible(parts, int(row.argmax())), float(row.max()))
        for layer, row in enumerate(layers_LV)
    ]
    rows = torch.stack([weights[:, -1] for weights in one.weights])
    num_drawn = int((drawn_V > 0).sum())
    return _Chosen(token, float(said_V[token]), candidates, num_drawn, by_layer, rows)


def _visible(parts: _Parts, token_id: int) -> str:
    """As the vocabulary spells it, with a mark for a space."""
    piece = parts.tokenizer.id_to_piece(token_id) or f"<{token_id}>"
    return piece.replace("Ġ", "␣").replace("Ċ", "⏎")


def _piece(parts: _Parts, token_id: int) -> Piece:
    text = _visible(parts, token_id)
    return Piece(token_id, text, text.startswith("<|") and text.endswith("|>"))


# ------------------------------------------------------------------------ the answer


def _answer(inputs: Inputs, parts: _Parts, told: _Told) -> Answer[Drawing]:
    at = min(inputs.at, len(told.chosen) - 1)
    here = told.chosen[at]
    said, text = _said(parts, told)
    ends = set(parts.model.spec.eos_token_ids)
    stopped = told.chosen[-1].token in ends
    seen = told.token_ids + [one.token for one in told.chosen[:at]]
    drawing = Drawing(
        [_piece(parts, i) for i in told.token_ids],
        told.embeddings.shape[1],
        [[round(x, 3) for x in row[:SHOWN_NUMBERS].tolist()] for row in told.embeddings],
        [
            [round(x, 4) for x in r]
            for r in told.weights[inputs.layer - 1][inputs.head - 1].tolist()
        ],
        [round(x, 4) for x in here.rows[inputs.layer - 1][inputs.head - 1].tolist()],
        here.rows.amax(-1).tolist(),
        [_piece(parts, i) for i in seen],
        here.by_layer,
        here.candidates,
        here.num_drawn_from,
        at,
        said,
        text,
        "stop" if stopped else "length",
        _visible(parts, min(ends)),
    )
    return Answer(
        _sentence(inputs, drawing),
        drawing,
        _figures(parts, drawing, here),
        _tables(drawing),
        _questions(inputs, parts, drawing, here),
        Guess(
            "How likely, in percent, does the model think the first token of its answer?",
            "%",
            round(100 * told.chosen[0].probability, 1),
        ),
    )


def _said(parts: _Parts, told: _Told) -> tuple[list[Said], str]:
    """The answer's tokens, and the text that each gave: none for a stop, later for half a
    character."""
    detokenizer, said = parts.tokenizer.detokenizer(), list[Said]()
    for one in told.chosen:
        piece = _piece(parts, one.token)
        gave = "" if piece.is_special else detokenizer.feed(one.token)
        said.append(Said(one.token, piece.text, one.probability, gave))
    return said, "".join(one.gave for one in said) + detokenizer.flush()


def _sentence(inputs: Inputs, drawing: Drawing) -> str:
    tokens = len(drawing.said)
    end = (
        f"the token {drawing.stop} ends it"
        if drawing.reason == "stop"
        else f"it is cut after {inputs.longest} tokens"
    )
    most = max(drawing.row)
    where = drawing.seen[drawing.row.index(most)].text
    return (
        f"{len(drawing.pieces)} tokens go in and {tokens} come out, one pass each, until {end}: "
        f"“{drawing.text.strip()}”. For “{drawing.said[drawing.at].text}”, head {inputs.head} of "
        f"layer {inputs.layer} looks mostly at “{where}” ({percent(most, 0)})."
    )


def _figures(parts: _Parts, drawing: Drawing, here: _Chosen) -> list[Figure]:
    spec, num = parts.model.spec, len(drawing.pieces)
    chosen, attention = drawing.said[drawing.at], spec.layers[0].attention
    kept, flops = kv_bytes(spec, num, 2), step_flops(spec, ((num, 0),), 1)
    return [
        Figure(
            "Tokens of the prompt", num, "", "measured",
            f"of a vocabulary of {spec.vocab_size:,}", "ridgeline.text.tokenizer.Tokenizer.encode",
        ),
        Figure(
            "Probability of the token", chosen.probability, "", "measured",
            f"softmax of {spec.vocab_size:,} logits at “{chosen.text}”", TRACE,
        ),
        Figure(
            "Operations for the prompt", flops, "FLOP", "ideal",
            f"2 x {count(num_parameters(spec))} parameters x {num} tokens, with attention and less "
            "what is looked up", "ridgeline.architectures.counts.step_flops",
        ),
        Figure(
            "Kept of the prompt", kept, "B", "ideal",
            f"{num} tokens x 2 x {spec.num_layers} layers x {attention.num_kv_heads} KV heads x "
            f"{attention.head_dim} x 2 B", "ridgeline.architectures.counts.kv_bytes",
        ),
    ]  # fmt: skip


def _tables(drawing: Drawing) -> list[Table]:
    return [
        Table(
            "Tokens of the prompt",
            ["token", "id", "first numbers of its embedding"],
            [[piece.text, piece.id, ", ".join(f"{x:.3f}" for x in row[:6])]
             for piece, row in zip(drawing.pieces, drawing.vectors, strict=True)],
        ),
        Table(
            "What might follow",
            ["token", "id", "logit", "probability", "drawn with"],
            [[c.text, c.id, c.logit, c.probability, c.drawn_from] for c in drawing.candidates],
        ),
        Table(
            "Attention of the row",
            ["token", "weight"],
            [list(one) for one in zip((p.text for p in drawing.seen), drawing.row, strict=True)],
        ),
        Table(
            "The answer",
            ["token", "id", "probability", "text"],
            [[one.text, one.id, one.probability, one.gave] for one in drawing.said],
        ),
    ]  # fmt: skip


def _questions(inputs: Inputs, parts: _Parts, drawing: Drawing, here: _Chosen) -> list[Question]:
    spec = parts.model.spec
    first = next(
        (g.layer for i, g in enumerate(drawing.by_layer)
         if all(later.text == drawing.by_layer[-1].text for later in drawing.by_layer[i:])),
        spec.num_layers,
    )  # fmt: skip
    one = step_flops(spec, ((1, len(drawing.seen)),), 1)
    return [
        Question(
            "From which layer on does the model know what it will say?",
            f"Read by the output matrix, the states say “{drawing.by_layer[-1].text}” from "
            + ("the embeddings" if first == 0 else f"behind layer {first}")
            + f" on, at last with {percent(drawing.by_layer[-1].probability, 1)}.",
        ),
        Question(
            "Does the prompt see the answer?",
            "No: a token attends to itself and to those before it. In the square of step 3, all to "
            "the right of the diagonal is exactly 0.",
        ),
        Question(
            "What is cheaper, a token of the prompt or of the answer?",
            f"Both take about {scaled(one, 'FLOP')}. But the prompt's {len(drawing.pieces)} tokens "
            "share one reading of the weights, and each token of the answer needs its own: "
            f"{len(drawing.said)} passes over {memory(2 * num_parameters(spec))} in 16 bits.",
        ),
    ]


PAGE = Page(
    name="journey",
    title="The journey of a prompt",
    idea="From text to text in seven steps, with the real numbers of the small model that comes "
    "with this program.",
    group="Start here",
    inputs=Inputs,
    answer=answer,
    long=True,
    needs_model=True,
    presets=(
        Preset("A sum", {}),
        Preset("Copying", {"text": "Copy: red blue green", "layer": 4}),
        Preset("A story", {
            "text": "Once upon a time, there was a little", "chat": False, "temperature": 1.0,
            "longest": 24, "step": "5 sampling",
        }),
        Preset("Small talk", {"text": "Hello, who are you?", "step": "6 text"}),
    ),
)  # fmt: skip
