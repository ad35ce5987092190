"""From a validated call to engine requests: template, tokens, limits, seeds, salt.

Everything here may take long (a long prompt, a slow template), so it runs in a worker thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256

from ridgeline.answer import Answer, check_prompt, resolve_sampling
from ridgeline.errors import RequestFault
from ridgeline.server.auth import Tenant
from ridgeline.server.calls import Call
from ridgeline.server.errors import ApiError, from_fault
from ridgeline.server.model import ServedModel
from ridgeline.text.tokenizer import Tokenizer

CHARACTERS_PER_TOKEN = 4  # about what text has; only texts with more are looked at in parts
CUT_TOKENS = 64  # a cut may change the tokens around it


@dataclass(frozen=True, slots=True)
class Prepared:
    """One Answer per prompt, and the prompts' texts when they are to be echoed."""

    answers: tuple[Answer, ...]
    prompt_texts: tuple[str, ...]

    @property
    def num_sequences(self) -> int:
        return sum(len(answer.requests) for answer in self.answers)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(answer.prompt_token_ids) for answer in self.answers)


def prepare(
    call: Call, model: ServedModel, request_id: str, tenant: Tenant, now: float
) -> Prepared:
    """Raises ApiError naming the field as the client wrote it."""
    place = 0
    try:
        prompts = encode_prompts(call, model)
        made = []
        for place, ids in enumerate(prompts):
            made.append(_answer(call, model, f"{request_id}-{place}", ids, tenant, now))
        answers = tuple(made)
    except RequestFault as fault:
        names = call.rename
        if fault.param == "prompt" and call.prompts:
            names = {"prompt": _path(call, place)} | names
        raise from_fault(fault, names) from None
    texts = tuple(_echo(p, ids, model) for p, ids in zip(call.prompts, prompts, strict=False))
    return Prepared(answers, texts if call.echo else ())


def encode_prompts(call: Call, model: ServedModel) -> list[tuple[int, ...]]:
    """Token ids of each prompt. Raises RequestFault or ApiError."""
    if call.conversation is not None:
        ids = encode_conversation(call, model)
        return [check_prompt(ids, model.ready.vocab_size)]
    encoded = []
    for i, prompt in enumerate(call.prompts):
        if isinstance(prompt, str):
            encoded.append(_encode(prompt, _path(call, i), call, model))
        else:
            encoded.append(prompt)
    return encoded


def _path(call: Call, place: int) -> str:
    """Of one of the prompts, as the client wrote it."""
    return "prompt" if len(call.prompts) == 1 else f"prompt[{place}]"


def encode_conversation(call: Call, model: ServedModel) -> list[int]:
    template, conversation = model.chat_template, call.conversation
    if template is None or conversation is None:
        raise ApiError(
            "chat_template_missing",
            "this model has no chat template; use /v1/completions",
            "messages",
        )
    words = "".join(m["content"] for m in conversation.messages if m["role"] == "user").strip()
    refuse_hopeless(need_tokenizer(model, "messages"), words, model.ready.max_servable_tokens)
    options = dict(conversation.template_options)
    return template.encode_chat(
        conversation.messages, None, conversation.add_generation_prompt, **options
    )


def _encode(prompt: str, path: str, call: Call, model: ServedModel) -> tuple[int, ...]:
    tokenizer = need_tokenizer(model, path)
    refuse_hopeless(tokenizer, prompt, model.ready.max_servable_tokens, param=path)
    ids = tokenizer.encode(prompt, call.add_special_tokens)
    if not ids:
        raise ApiError("empty_input", f"{path} has no tokens", path)
    return check_prompt(ids, model.ready.vocab_size)


def refuse_hopeless(
    tokenizer: Tokenizer, text: str, max_tokens: int, *, param: str = "prompt"
) -> None:
    """Raises RequestFault when a long text is over `max_tokens` already at its beginning.

    Megabytes of text for a context of kilobytes would otherwise keep a thread busy for seconds.
    The tokens of a beginning differ from those of the whole only near the cut.
    """
    length = CHARACTERS_PER_TOKEN * max_tokens
    while length < len(text):
        if len(tokenizer.encode(text[:length], add_special_tokens=False)) > max_tokens + CUT_TOKENS:
            raise RequestFault(
                f"the prompt has more than the {max_tokens} tokens that can be served; shorten it",
                param=param,
                code="context_length_exceeded",
            )
        length *= 2


def need_tokenizer(model: ServedModel, param: str) -> Tokenizer:
    if model.tokenizer is None:
        raise ApiError("invalid_value", "this model has no tokenizer; give token ids", param)
    return model.tokenizer


def _answer(
    call: Call, model: ServedModel, answer_id: str, ids: tuple[int, ...], tenant: Tenant, now: float
) -> Answer:
    sampling = resolve_sampling(
        call.sampling,
        len(ids),
        max_model_len=model.ready.max_servable_tokens,
        vocab_size=model.ready.vocab_size,
        end_token_ids=model.ready.end_token_ids,
    )
    return Answer(
        answer_id,
        ids,
        sampling,
        tokenizer=model.tokenizer,
        end_token_ids=frozenset(model.ready.end_token_ids),
        arrival_time=now,
        priority=call.priority,
        cache_salt=cache_salt(tenant.key, call.cache_salt),
        tenant=tenant.name,
    )


def cache_salt(key: bytes, salt: str) -> bytes:
    """Who may share cached prompts: those with the same API key and the same salt of their own."""
    if not key and not salt:
        return b""
    return sha256(b"ridgeline prefix cache\0" + key + b"\0" + salt.encode()).digest()


def _echo(prompt: str | tuple[int, ...], ids: tuple[int, ...], model: ServedModel) -> str:
    if isinstance(prompt, str):
        return prompt
    return "" if model.tokenizer is None else model.tokenizer.decode(ids, skip_special_tokens=False)
