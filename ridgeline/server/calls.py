"""What does a client want, in our own terms? One shape for completions and chat."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ridgeline.request import SamplingParams
from ridgeline.server.errors import ApiError
from ridgeline.server.fields import Fields

Message = dict[str, str]  # as the chat template takes it


class Kind(Enum):
    COMPLETION = "completion"
    CHAT = "chat"


@dataclass(frozen=True, slots=True)
class StreamOptions:
    include_usage: bool = False
    continuous_usage: bool = False

    @property
    def shows_usage(self) -> bool:
        return self.include_usage or self.continuous_usage


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages to be rendered by the model's template."""

    messages: tuple[Message, ...]
    add_generation_prompt: bool = True
    template_options: tuple[tuple[str, bool], ...] = ()


@dataclass(frozen=True, slots=True)
class Call:
    """A validated request. `prompts` are texts or token ids; chat has one Conversation.

    `sampling` still has open fields (max_tokens None, seed None). `rename` maps our field names
    to those the client used, for faults found later. `top_logprobs` is what to show per token,
    None for no log-probabilities. `drop_output` answers with the echo alone (max_tokens 0).
    """

    kind: Kind
    model: str
    prompts: tuple[str | tuple[int, ...], ...]
    conversation: Conversation | None
    sampling: SamplingParams
    rename: dict[str, str]
    stream: StreamOptions | None = None
    top_logprobs: int | None = None
    echo: bool = False
    drop_output: bool = False
    add_special_tokens: bool = True
    return_token_ids: bool = False
    cache_salt: str = ""
    priority: int = 0
    include_cost: bool = False

    @property
    def num_sequences(self) -> int:
        """Answers, those of `best_of` that lose and beams included."""
        each = max(self.sampling.num_samples, self.sampling.beam_width)
        return max(1, len(self.prompts)) * each


def read_stream(fields: Fields) -> StreamOptions | None:
    """None when the whole answer is wanted at once."""
    streams = fields.flag("stream")
    options = fields.nested("stream_options")
    if options is None:
        return StreamOptions() if streams else None
    if not streams:
        raise ApiError("invalid_value", "stream_options needs stream: true", "stream_options")
    options.allow()
    options.flag("include_obfuscation")
    return StreamOptions(
        bool(options.flag("include_usage")), bool(options.flag("continuous_usage_stats"))
    )


def refuse_too_many(num_prompts: int, sampling: SamplingParams, most: int) -> None:
    """Answers of one request, those of `best_of` that lose and beams included."""
    each = max(sampling.num_samples, sampling.beam_width)
    if num_prompts * each > most:
        raise ApiError(
            "limit_exceeded",
            f"{num_prompts} prompts with {each} answers each are more than the {most} answers that "
            "one request may ask for",
            "prompt" if num_prompts > 1 else "n",
        )


def refuse_cost_unseen(stream: StreamOptions | None, *, include_cost: bool) -> None:
    """It comes with the usage, which a stream has only where it was asked for."""
    if include_cost and stream is not None and not stream.shows_usage:
        raise ApiError(
            "invalid_value",
            "include_cost of a stream needs stream_options.include_usage: true",
            "include_cost",
        )


def refuse_unstreamable(sampling: SamplingParams, stream: StreamOptions | None) -> None:
    """What is known only at the end cannot be streamed."""
    if stream is None:
        return
    if sampling.beam_width > 1:
        raise ApiError("invalid_value", "beam search cannot be streamed", "stream")
    if sampling.num_samples != sampling.n:
        raise ApiError("invalid_value", "best_of above n cannot be streamed", "best_of")
    if sampling.prompt_logprobs is not None:
        raise ApiError("invalid_value", "prompt_logprobs cannot be streamed", "prompt_logprobs")
