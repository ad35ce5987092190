"""What does a client want, in our own terms? One shape for completions and chat."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from msgspec import structs

from ridgeline.declared import made
from ridgeline.errors import RequestFault
from ridgeline.request import Sampling, SamplingParams, check_together, constraint
from ridgeline.server.bodies import (
    Asking,
    ChatBody,
    CompletionBody,
    ResponseFormat,
    StreamOptions,
    check_text,
    read,
    wrong_type,
)
from ridgeline.server.errors import ApiError, from_fault

Message = dict[str, Any]  # as the chat template takes it
Prompt = str | tuple[Any, ...]

# What a beam search cannot honour, and the values that ask for nothing. The model's own defaults
# for these are put aside.
BEAM_NEUTRAL: dict[str, tuple[float, ...]] = {
    "temperature": (0, 1),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "repetition_penalty": (1,),
}
DEFAULT = SamplingParams()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages to be rendered by the model's template."""

    messages: tuple[Message, ...]
    add_generation_prompt: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[dict[str, Any], ...] = ()
    continue_final_message: bool = False


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """A validated request. `prompts` are texts or token ids; chat has one Conversation.

    `sampling` still has open fields (max_tokens None, seed None). `rename` maps our field names
    to those the client used, for faults found later. `top_logprobs` is what to show per token,
    None for no log-probabilities. `drop_output`: nothing is said beside the prompt (max_tokens 0).
    `tools` are the schemas of what may be called, by name. `forced_end` is the `finish_reason` of
    an answer that must be calls, as JSON; None where it may be anything.
    """

    body: CompletionBody | ChatBody
    prompts: tuple[Prompt, ...]
    conversation: Conversation | None
    sampling: SamplingParams
    rename: dict[str, str]
    top_logprobs: int | None = None
    drop_output: bool = False
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    forced_end: str | None = None

    @property
    def is_chat(self) -> bool:
        return self.conversation is not None

    @property
    def has_list_of_prompts(self) -> bool:
        return isinstance(self.body, CompletionBody) and _is_list_of_prompts(self.body.prompt)

    @property
    def echo(self) -> bool:
        return isinstance(self.body, CompletionBody) and self.body.echo

    @property
    def add_special_tokens(self) -> bool:
        return isinstance(self.body, CompletionBody) and self.body.add_special_tokens

    @property
    def stream_options(self) -> StreamOptions:
        return self.body.stream_options or StreamOptions()

    @property
    def num_sequences(self) -> int:
        """Answers, those of `best_of` that lose and beams included."""
        each = max(self.sampling.num_samples, self.sampling.beam_width)
        return max(1, len(self.prompts)) * each


def read_completion(
    body: Mapping[str, object], defaults: Mapping[str, Any], max_sequences: int
) -> ParsedRequest:
    """The call that a parsed body makes. Raises ApiError naming the field at fault."""
    asked = read(body, CompletionBody)
    prompts = _prompts(asked.prompt, max_sequences)
    given = names_given(body)
    shows_prompt = asked.echo and asked.logprobs is not None
    more: dict[str, object] = {"prompt_logprobs": asked.logprobs} if asked.echo else {}
    sampling = sampling_of(
        asked,
        given,
        {
            **defaults,
            **more,
            "best_of": asked.best_of,
            "logprobs": asked.logprobs,
            "max_tokens": max(1, asked.max_tokens),
        },
    )
    refuse_unservable(asked, sampling, len(prompts), max_sequences, shows_prompt=shows_prompt)
    if shows_prompt and "prompt_logprobs" in given:
        raise ApiError(
            "invalid_value",
            "echo with logprobs has those of the prompt; leave prompt_logprobs out",
            "prompt_logprobs",
        )
    return ParsedRequest(
        asked,
        prompts,
        None,
        sampling,
        dict(zip(OUR_NAME, CONSTRAINTS & given, strict=False)),
        top_logprobs=asked.logprobs,
        drop_output=asked.max_tokens == 0,
    )


def names_given(body: Mapping[str, object]) -> frozenset[str]:
    """null counts as absent."""
    return frozenset(name for name, value in body.items() if value is not None)


# ---------------------------------------------------------------------- sampling


def sampling_of(asked: Asking, given: Collection[str], others: Mapping[str, Any]) -> SamplingParams:
    """What the body says itself, over `others`, over OpenAI's defaults. Raises ApiError naming the
    field."""
    own = {name: getattr(asked, name) for name in Sampling.__struct_fields__ if name in given}
    try:
        if not CONSTRAINTS.isdisjoint(given):
            own["structured_outputs"] = _constraint(asked, constrained_by(given))
        sampling = structs.replace(DEFAULT, **{**others, **own})
        sampling = _with_beams(sampling, asked, given)
        check_together(sampling)
    except RequestFault as fault:
        raise from_fault(fault) from None
    return sampling


OUR_NAME = ("structured_outputs",)
# Fields that say what the text of an answer must be; `guided_` stands before an older name of one
# that structured_outputs has.
GUIDED = "guided_"
CONSTRAINTS = frozenset(
    {
        "structured_outputs",
        "response_format",
        *(name for name in Asking.__struct_fields__ if name.startswith(GUIDED)),
    }
)


def constrained_by(given: Collection[str]) -> str:
    """The field that says what the answer must be. Raises ApiError for several."""
    found = sorted(CONSTRAINTS.intersection(given))
    if len(found) > 1:
        message = f"{found[0]} cannot be combined with {found[1]}"
        raise ApiError("invalid_value", message, found[0])
    return found[0]


def _constraint(asked: Asking, name: str) -> str:
    """Of an older form, or OpenAI's. RequestFault names the field as the client wrote it."""
    if name == "structured_outputs":
        return asked.structured_outputs  # type: ignore[return-value]
    if name == "response_format":
        given = {k: v for k, v in (asked.response_format or {}).items() if v is not None}
        return constraint(made(ResponseFormat, given, name).constraint, name)
    try:
        return constraint({name.removeprefix(GUIDED): getattr(asked, name)}, name)
    except RequestFault as fault:
        inner = f"{name}.{name.removeprefix(GUIDED)}"
        message = str(fault).replace(inner, name, 1)
        param = (fault.param or name).replace(inner, name, 1)
        raise RequestFault(message, param=param, code=fault.code) from None


def _with_beams(sampling: SamplingParams, asked: Asking, given: Collection[str]) -> SamplingParams:
    """`use_beam_search` with `beam_width` (or, as older clients have it, `best_of`) beams."""
    width = asked.beam_width if "beam_width" in given else None
    wanted = asked.use_beam_search
    if wanted is None:
        wanted = width is not None and width > 1
    elif not wanted and width is not None and width > 1:
        raise ApiError(
            "invalid_value",
            f"beam_width {width} is for a beam search, which use_beam_search false refuses",
            "beam_width",
        )
    if not wanted:
        if asked.length_penalty != 1 or asked.early_stopping:
            name = "early_stopping" if asked.early_stopping else "length_penalty"
            raise ApiError("invalid_value", f"{name} needs use_beam_search", name)
        return sampling
    if width is not None and sampling.best_of not in (None, width):
        raise ApiError("invalid_value", "best_of cannot be combined with beam_width", "best_of")
    width = width or sampling.num_samples
    if width < 2:
        raise ApiError(
            "missing_required_parameter", "use_beam_search needs a beam_width above 1", "beam_width"
        )
    for name, neutral in BEAM_NEUTRAL.items():
        if name in given and getattr(asked, name) not in neutral:
            raise ApiError("unsupported_parameter", f"{name} has no effect on beams", name)
    return structs.replace(
        sampling,
        temperature=0.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
        best_of=None,
        beam_width=width,
    )


# ---------------------------------------------------------------------- what cannot be served


def refuse_unservable(
    asked: Asking,
    sampling: SamplingParams,
    num_prompts: int,
    most: int,
    *,
    shows_prompt: bool = False,
) -> None:
    """Raises ApiError for fields that are right and contradict each other or a limit of ours.
    `shows_prompt`: with its log-probabilities."""
    each = max(sampling.num_samples, sampling.beam_width)  # those of `best_of` that lose included
    if num_prompts * each > most:
        raise ApiError(
            "limit_exceeded",
            f"{num_prompts} prompts with {each} answers each are more than the {most} answers that "
            "one request may ask for",
            "prompt" if num_prompts > 1 else "n",
        )
    options = asked.stream_options
    if not asked.stream:
        if options is not None:
            raise ApiError("invalid_value", "stream_options needs stream: true", "stream_options")
        return
    # What is known only at the end cannot be streamed.
    if shows_prompt:
        raise ApiError("invalid_value", "echo with logprobs cannot be streamed", "stream")
    if sampling.beam_width > 1:
        raise ApiError("invalid_value", "beam search cannot be streamed", "stream")
    if sampling.num_samples != sampling.n:
        raise ApiError("invalid_value", "best_of above n cannot be streamed", "best_of")
    if sampling.prompt_logprobs is not None:
        raise ApiError("invalid_value", "prompt_logprobs cannot be streamed", "prompt_logprobs")
    if asked.include_cost and (options is None or not options.shows_usage):
        raise ApiError(
            "invalid_value",
            "include_cost of a stream needs stream_options.include_usage: true",
            "include_cost",
        )


# ---------------------------------------------------------------------- prompts


def _prompts(value: object, most: int) -> tuple[Prompt, ...]:
    """One prompt or many, as texts or token ids, which are looked at later: there are many. Raises
    ApiError with the path of the fault."""
    if _is_list_of_prompts(value):
        if len(value) > most:
            raise ApiError("limit_exceeded", f"prompt takes at most {most} prompts", "prompt")
        return tuple(_prompt(item, f"prompt[{i}]") for i, item in enumerate(value))
    return (_prompt(value, "prompt"),)


def _is_list_of_prompts(value: object) -> TypeGuard[list[object]]:
    return isinstance(value, list) and bool(value) and isinstance(value[0], (str, list))


def _prompt(item: object, param: str) -> Prompt:
    if not isinstance(item, (str, list)):
        wanted = "a string, a list of strings or token ids"
        raise wrong_type(param, wanted if param == "prompt" else "a string or token ids", item)
    if not item:
        raise ApiError("empty_input", f"{param} is empty", param)
    return check_text(item, param) if isinstance(item, str) else tuple(item)
