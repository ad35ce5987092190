"""From a validated call to engine requests: template, tokens, limits, seeds, salt.

Templates and tokenizers run in processes of their own: `question_of` says what they are asked, and
`prepare` goes on with what they answer. What has many tokens takes long in both, and is for a
worker thread.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from hashlib import sha256

from ridgeline.answer import Answer, check_prompt, resolve_sampling
from ridgeline.errors import RequestFault
from ridgeline.server.auth import Tenant
from ridgeline.server.errors import ApiError, from_fault
from ridgeline.server.model import ServedModel
from ridgeline.server.parsed_request import Conversation, ParsedRequest, Prompt
from ridgeline.server.text_client import TextFault
from ridgeline.server.text_wire import IDS, Encode, EncodeChat, Question
from ridgeline.text.vocabulary import Vocabulary


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


def question_of(call: ParsedRequest, model: ServedModel) -> Question | None:
    """What the tokenizer must be asked; None when the prompts are token ids. Raises ApiError."""
    if call.conversation is not None:
        return conversation_question(call.conversation, model)
    texts = tuple(prompt for prompt in call.prompts if isinstance(prompt, str))
    if not texts:
        return None
    places = (i for i, prompt in enumerate(call.prompts) if isinstance(prompt, str))
    need_tokenizer(model, _path(call, next(places)))
    return Encode(texts, call.add_special_tokens, model.ready.max_servable_tokens)


def conversation_question(conversation: Conversation, model: ServedModel) -> EncodeChat:
    if not model.has_chat_template:
        raise ApiError(
            "chat_template_missing",
            "this model has no chat template; use /v1/completions",
            "messages",
        )
    need_tokenizer(model, "messages")
    return EncodeChat(
        conversation.messages,
        conversation.add_generation_prompt,
        dict(conversation.template_options),
        model.ready.max_servable_tokens,
        conversation.tools,
        conversation.continue_final_message,
    )


def fault_of(call: ParsedRequest, fault: TextFault) -> ApiError:
    """What the tokenizer found, in the client's words."""
    if call.conversation is not None or fault.place is None:
        return from_fault(fault)
    texts = [i for i, prompt in enumerate(call.prompts) if isinstance(prompt, str)]
    return from_fault(fault, {"prompt": _path(call, texts[fault.place])})


def prepare(
    call: ParsedRequest,
    model: ServedModel,
    encoded: tuple[bytes, ...],
    request_id: str,
    tenant: Tenant,
    now: float,
) -> Prepared:
    """`encoded` are the token ids of the call's texts, as arrays. Raises ApiError naming the field
    as the client wrote it."""
    answers, echoes = [], []
    texts = iter(encoded)
    for place, prompt in enumerate(call.prompts or ("",)):
        given = array(IDS, next(texts)) if isinstance(prompt, str) else prompt
        if call.prompts and not given:
            path = _path(call, place)
            raise ApiError("empty_input", f"{path} has no tokens", path)
        try:
            ids = check_prompt(given, model.ready.vocab_size)
            answers.append(_answer(call, model, f"{request_id}-{place}", ids, tenant, now))
        except RequestFault as fault:
            names = {"prompt": _path(call, place)} if call.prompts else {}
            raise from_fault(fault, names | call.rename) from None
        if call.echo:
            echoes.append(_echo(prompt, ids, model))
    return Prepared(tuple(answers), tuple(echoes))


def _path(call: ParsedRequest, place: int) -> str:
    """Of one of the prompts, as the client wrote it."""
    return f"prompt[{place}]" if call.has_list_of_prompts else "prompt"


def need_tokenizer(model: ServedModel, param: str) -> Vocabulary:
    if model.vocabulary is None:
        raise ApiError("invalid_value", "this model has no tokenizer; give token ids", param)
    return model.vocabulary


def _answer(
    call: ParsedRequest,
    model: ServedModel,
    answer_id: str,
    ids: tuple[int, ...],
    tenant: Tenant,
    now: float,
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
        tokenizer=model.format.vocabulary if call.is_chat else model.vocabulary,
        end_token_ids=frozenset(model.ready.end_token_ids),
        arrival_time=now,
        priority=call.body.priority,
        cache_salt=cache_salt(tenant.key, call.body.cache_salt),
        tenant=tenant.name,
        weight=tenant.weight,
    )


def cache_salt(key: bytes, salt: str) -> bytes:
    """Who may share cached prompts: those with the same API key and the same salt of their own."""
    if not key and not salt:
        return b""
    return sha256(b"ridgeline prefix cache\0" + key + b"\0" + salt.encode()).digest()


def _echo(prompt: Prompt, ids: tuple[int, ...], model: ServedModel) -> str:
    if isinstance(prompt, str):
        return prompt
    vocabulary = model.vocabulary
    return "" if vocabulary is None else vocabulary.decode(ids, skip_special_tokens=False)
