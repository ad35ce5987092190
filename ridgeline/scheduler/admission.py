"""Can this request ever be served here? If not, which number decides?"""

from __future__ import annotations

from ridgeline.errors import RequestFault
from ridgeline.request import MAX_LOGPROBS, Request, SamplingParams
from ridgeline.scheduler.beams import BEAM_MARK, num_candidates
from ridgeline.scheduler.block_manager import (
    BlockManager,
    beam_blocks_needed,
    blocks_needed,
    max_servable_tokens,
)

# What would have no effect in a beam search, and the values that say so.
_BEAM_NEUTRAL: dict[str, tuple[object, ...]] = {
    "temperature": (0.0, 1.0),
    "top_k": (0, -1),
    "top_p": (1.0,),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": ((),),
    "stop": ((),),
    "prompt_logprobs": (None,),
}


class Capacity:
    """What one pool, one step and one batch can hold; the same numbers for every question."""

    def __init__(
        self,
        blocks: BlockManager,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        *,
        chunked_prefill: bool = True,
    ) -> None:
        self.blocks = blocks
        self.chunked_prefill = chunked_prefill
        self.chunk = max_num_batched_tokens
        self.max_num_seqs = max_num_seqs
        self.max_servable_tokens = max_servable_tokens(
            blocks.num_blocks, blocks.block_size, blocks.windows, self.chunk
        )

    def blocks_needed(self, request: Request, num_beams: int = 1) -> int:
        """Most blocks that `request`, or so many beams of it, ever hold at once."""
        num_prompt, size = len(request.prompt_token_ids), self.blocks.block_size
        return beam_blocks_needed(
            num_prompt, request.max_num_tokens, num_beams, size, self.blocks.windows, self.chunk
        )

    def blocks_to_come(self, request: Request, held: list[int]) -> int:
        """Blocks it may still ask for beyond those it holds, one number per group."""
        size, chunk, total = self.blocks.block_size, self.chunk, request.max_num_tokens
        return sum(
            max(0, blocks_needed(total, size, (window,), chunk) - num)
            for window, num in zip(self.blocks.windows, held, strict=True)
        )

    def check(self, request: Request) -> None:
        """Raises RequestFault for what can never be served, naming the number that decides."""
        if not request.prompt_token_ids:
            raise RequestFault("the prompt has no tokens", param="prompt", code="empty_input")
        if BEAM_MARK in request.request_id:
            raise RequestFault(f"a request id must not contain {BEAM_MARK!r}", param="request_id")
        if request.sampling.beam_width > 1:
            self._check_beams(request.sampling)
        if self.blocks_needed(request, request.sampling.beam_width) > self.blocks.num_blocks:
            raise self._too_long(request)
        if not self.chunked_prefill:
            self._check_whole(request)

    def _check_whole(self, request: Request) -> None:
        """One step must be able to compute it, answer included, beside all that decode."""
        need = request.max_num_tokens + self.max_num_seqs - 2
        if need > self.chunk:
            raise RequestFault(
                f"without chunked prefill a request of {request.max_num_tokens} tokens needs "
                f"max_num_batched_tokens {need} (with {self.max_num_seqs} sequences at once), and "
                f"it is {self.chunk}; raise it, or shorten the request",
                param="prompt",
                code="context_length_exceeded",
            )

    def _too_long(self, request: Request) -> RequestFault:
        num_prompt, limit = len(request.prompt_token_ids), self.max_servable_tokens
        pool = f"a KV cache of {self.blocks.num_blocks} blocks of {self.blocks.block_size} tokens"
        asked = f"{num_prompt} prompt tokens and max_tokens {request.sampling.max_tokens}"
        if request.max_num_tokens <= limit:
            width = request.sampling.beam_width
            message = (
                f"{asked} with beam_width {width} need "
                f"{self.blocks_needed(request, width)} blocks, more than {pool} has; "
                f"lower beam_width or max_tokens, or raise num_blocks"
            )
            return RequestFault(message, param="beam_width", code="context_length_exceeded")
        message = (
            f"{asked} make {request.max_num_tokens} tokens, and {pool} can serve at most {limit} "
            f"for one request; shorten the prompt, lower max_tokens or raise num_blocks"
        )
        param = "prompt" if num_prompt >= limit else "max_tokens"
        return RequestFault(message, param=param, code="context_length_exceeded")

    def _check_beams(self, sampling: SamplingParams) -> None:
        for name, neutral in _BEAM_NEUTRAL.items():
            value = getattr(sampling, name)
            if value not in neutral:
                message = f"{name} is not supported together with beam_width; leave it out"
                raise RequestFault(message, param=name, code="unsupported_parameter")
        if sampling.beam_width > self.max_num_seqs:
            raise RequestFault(
                f"beam_width {sampling.beam_width} is more than the {self.max_num_seqs} sequences "
                "(max_num_seqs) that run at once; lower beam_width or raise max_num_seqs",
                param="beam_width",
                code="limit_exceeded",
            )
        if num_candidates(sampling) > MAX_LOGPROBS:
            raise RequestFault(
                f"a beam search with beam_width {sampling.beam_width} takes at most "
                f"{MAX_LOGPROBS - sampling.beam_width} stop_token_ids",
                param="stop_token_ids",
                code="limit_exceeded",
            )
