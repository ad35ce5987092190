"""What is a request, and how far has it got?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar, dataclass_transform

import msgspec
from msgspec import structs

from ridgeline.declared import LIMIT, NOT_A_TOKEN, made, says
from ridgeline.errors import RequestFault

T = TypeVar("T")

PLAIN_TYPES = frozenset({int, float, bool, str, type(None), tuple, frozenset, list, dict})
UNKNOWN_TOKEN = -1  # sampled on the device, not yet read back to the host

MAX_N = 8
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 256
MAX_LOGPROBS = 20
MAX_REPETITION = 1e6  # and its inverse: beyond these logits are no float32 any more
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_CONSTRAINT_BYTES = 1 << 17
MAX_CHOICES = 1024
CONSTRAINT = "object with one field"  # kind of a field that holds StructuredOutputs
SCHEMA = "JSON schema"  # kind of a field that holds one, or its text


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """A slotted dataclass that nobody writes to, which the type checker holds: a frozen one takes
    four times as long to make, and of these there is one for each row of each step."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


def plain(value: object) -> object:
    """`value` in Python's own types, if it is an array, a tensor or a number of numpy, PyTorch or
    pandas: all of them have `tolist`."""
    if type(value) in PLAIN_TYPES or isinstance(value, type):
        return value
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else value


def _fail(name: str, message: str, code: str = "invalid_value") -> NoReturn:
    raise RequestFault(f"{name} {message}", param=name, code=code)


# ---------------------------------------------------------------------- sampling parameters

MAX_TOKEN_COUNT = 1 << 30
MAX_TOKEN_ID = 1 << 31
MAX_SEED = (1 << 63) - 1

TokenId = Annotated[int, says(ge=0, le=MAX_TOKEN_ID - 1, over=NOT_A_TOKEN, wrong=NOT_A_TOKEN)]
StopText = Annotated[str, says(lengths=(1, MAX_STOP_LENGTH), over=LIMIT, under="empty_input")]
Bias = Annotated[float, says(ge=-100, le=100)]
Samples = Annotated[
    int,
    says(
        "make that many answers and give the n likeliest", ge=1, le=MAX_N, over=LIMIT, default="n"
    ),
]
TopLogprobs = Annotated[
    int,
    says(
        "log-probability of each token, and of the k likeliest beside it",
        ge=0,
        le=MAX_LOGPROBS,
        over=LIMIT,
        is_common=True,
    ),
]
TEMPERATURE = "0 always takes the likeliest token, 1 samples from the model's distribution"
if TYPE_CHECKING:  # what a caller may give
    Texts = str | Iterable[str]
    TokenIds = Iterable[int]
    Biases = Mapping[int, float] | tuple[tuple[int, float], ...]
    Constraint = Mapping[str, Any] | str
else:  # what a record holds
    Texts = tuple[StopText, ...]
    TokenIds = frozenset[TokenId]
    Biases = tuple[tuple[TokenId, Bias], ...]
    Constraint = str


class Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    begin: Annotated[str, says("text that begins it; one of the triggers begins this text")]
    schema: Annotated[
        dict[str, Any], says("JSON schema of what stands between begin and end", kind="object")
    ]
    end: Annotated[str, says("text that ends it")]


class StructuralTag(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Free text with parts of a given form in it."""

    structures: Annotated[
        list[Structure], says("forms of such parts", lengths=(1, 64), fields=Structure)
    ]
    triggers: Annotated[
        list[Annotated[str, says(lengths=(1, MAX_STOP_LENGTH))]],
        says("where one of these texts comes, a structure begins", lengths=(1, 64)),
    ]


Choices = Annotated[
    list[Annotated[str, says(lengths=(1, None))]],
    says("one of these texts", lengths=(1, MAX_CHOICES)),
]


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the text of an answer must be; one of these."""

    json: Annotated[Any, says("JSON by this schema", kind=SCHEMA)] | None = None
    regex: Annotated[str, says("a text that this regular expression matches")] | None = None
    choice: Choices | None = None
    grammar: Annotated[str, says("a text of this grammar, in Lark's or in GBNF's form")] | None = (
        None
    )
    json_object: Annotated[bool, says("any JSON object")] | None = None
    structural_tag: (
        Annotated[StructuralTag, says("text with parts in it that have a form")] | None
    ) = None


class _Checked(msgspec.StructMeta):
    """Whoever calls the class may be wrong; what is decoded msgspec has checked already, and
    `structs.replace` is for values that are known to be right."""

    def __call__(cls, **given: object) -> Any:
        return checked(cls, given)  # type: ignore[arg-type]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every way to ask for an answer may say of its tokens: the Python API, the command and
    both kinds of HTTP requests. A field that is added here is a keyword, a flag and a field of
    both, and goes to the engine."""

    temperature: Annotated[float, says(TEMPERATURE, ge=0, le=100, is_common=True)] = 1.0
    top_p: Annotated[
        float,
        says(
            "sample among the likeliest tokens that together have this probability",
            gt=0,
            le=1,
            is_common=True,
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        says(
            "sample among the k likeliest tokens; 0 and -1 are off",
            ge=-1,
            le=MAX_TOKEN_COUNT,
            is_common=True,
        ),
    ] = 0
    min_p: Annotated[
        float,
        says(
            "drop tokens less likely than this share of the likeliest one's probability", ge=0, le=1
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        says(
            "above 1 makes tokens that occurred less likely, multiplying",
            ge=1 / MAX_REPETITION,
            le=MAX_REPETITION,
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float, says("above 0 makes tokens of the answer less likely, once", ge=-2, le=2)
    ] = 0.0
    frequency_penalty: Annotated[
        float, says("above 0 makes tokens of the answer less likely, per occurrence", ge=-2, le=2)
    ] = 0.0
    logit_bias: Annotated[
        Biases,
        says(
            "token id (a string of digits) to a number from -100 to 100 that is added to its logit",
            lengths=(None, MAX_LOGIT_BIAS),
            kind="object of numbers",
        ),
    ] = ()
    seed: (
        Annotated[
            int,
            says(
                "the same seed gives the same answer",
                ge=-MAX_SEED - 1,
                le=MAX_SEED,
                default="one from the request's id",
                is_common=True,
            ),
        ]
        | None
    ) = None
    stop: Annotated[
        Texts,
        says(
            f"the answer ends before this text; each has at most {MAX_STOP_LENGTH} characters",
            lengths=(None, MAX_STOP_STRINGS),
            kind="string or list of strings",
            is_common=True,
        ),
    ] = ()
    stop_token_ids: Annotated[
        TokenIds,
        # No bound of the type: in what is resolved the model's own end tokens are among them.
        says("token ids that end the answer", most=MAX_STOP_TOKEN_IDS),
    ] = frozenset()
    ignore_eos: Annotated[
        bool, says("go on after the model's own end token, up to the last token allowed")
    ] = False
    n: Annotated[
        int, says("answers for each prompt", ge=1, le=MAX_N, over=LIMIT, is_common=True)
    ] = 1
    min_tokens: Annotated[int, says("no end before that many tokens", ge=0, le=MAX_TOKEN_COUNT)] = 0
    skip_special_tokens: Annotated[
        bool, says("leave special tokens out of the text", flag="--show-special-tokens")
    ] = True
    structured_outputs: Annotated[
        Constraint,
        says(
            "what the text must be: JSON by a schema, one of some texts, or by a regular "
            "expression or grammar",
            kind=CONSTRAINT,
            metavar="JSON",
        ),
    ] = ""
    prompt_logprobs: (
        Annotated[
            int,
            says(
                "log-probability of each prompt token, and of the k likeliest beside it",
                ge=0,
                le=MAX_LOGPROBS,
                over=LIMIT,
            ),
        ]
        | None
    ) = None
    beam_width: Annotated[
        int, says("how many beams", ge=1, le=MAX_N, over=LIMIT, default="best_of or n")
    ] = 1
    length_penalty: Annotated[
        float, says("beams are ranked by log-probability / length ** this", ge=-10, le=10)
    ] = 1.0
    early_stopping: Annotated[
        bool, says("end the beam search as soon as enough beams are complete")
    ] = False


class SamplingParams(Sampling, metaclass=_Checked, frozen=True, kw_only=True, omit_defaults=True):
    """How to choose the tokens of an answer. Bad values raise RequestFault with the field's name.

    temperature 0 is greedy. top_k 0 or -1 is off. `max_tokens=None` means up to the context's end.
    `stop` strings are cut from the text, `stop_token_ids` (and the model's own end tokens, unless
    `ignore_eos`) end it. `n` answers are returned, the best of `best_of`. `beam_width` above 1 is
    beam search: `n` (at most the width) best beams by sum of log-probabilities divided by
    length ** length_penalty. `seed` makes the noise a function of (seed, position) alone.
    `logprobs=k` gives the chosen token's log-probability (of the raw logits' log-softmax) and the
    k likeliest.
    """

    max_tokens: (
        Annotated[int, says("most tokens of the answer", ge=1, le=MAX_TOKEN_COUNT, is_common=True)]
        | None
    ) = 16
    best_of: Samples | None = None
    logprobs: TopLogprobs | None = None

    @property
    def num_samples(self) -> int:
        """How many answers the engine makes: `best_of` when given, else `n`."""
        return self.best_of or self.n

    @property
    def constraint(self) -> str:
        """`structured_outputs` as a record holds it; see `constraint`."""
        return str(self.structured_outputs)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def replace(self, **changes: Any) -> SamplingParams:
        """The same but for `changes`, which are checked as those of a new one are."""
        return SamplingParams(**{**structs.asdict(self), **changes})

    __replace__ = replace

    def resolved(self, max_tokens: int, seed: int, end_token_ids: Iterable[int]) -> SamplingParams:
        """The same with what was open: numbers that are right, and, unless ignored, the model's own
        end tokens among `stop_token_ids`. Nothing is checked once more: prompts wait for this."""
        stops = frozenset(self.stop_token_ids)
        if not self.ignore_eos:
            stops = stops.union(end_token_ids)
        return structs.replace(self, max_tokens=max_tokens, seed=seed, stop_token_ids=stops)


def checked(kind: type[SamplingParams], given: Mapping[str, object]) -> SamplingParams:
    """A record of what a caller of the Python API gave: numbers of numpy and lists of any kind are
    welcome. RequestFault names the field that is wrong."""
    values = {
        name: FORMS[name](value) if name in FORMS else plain(value) for name, value in given.items()
    }
    try:
        found = made(kind, values)
    except RequestFault as fault:
        if fault.code == "unknown_parameter":
            raise TypeError(f"{kind.__name__} has no field {fault.param!r}") from None
        name = (fault.param or "").partition("[")[0]
        message = str(fault).removeprefix(fault.param or "")
        raise RequestFault(name + message, param=name, code=fault.code) from None
    check_together(found)
    return found


def check_together(sampling: SamplingParams) -> None:
    """RequestFault where fields that are right contradict each other."""
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        _fail("min_tokens", f"must not exceed max_tokens ({sampling.max_tokens})")
    if sampling.best_of is not None and sampling.best_of < sampling.n:
        _fail("best_of", f"must be at least n ({sampling.n})")
    if sampling.beam_width > 1 and sampling.n > sampling.beam_width:
        _fail("n", f"must not exceed beam_width ({sampling.beam_width})")
    if sampling.beam_width > 1 and sampling.best_of is not None:
        _fail("best_of", "cannot be combined with beam_width")
    if sampling.structured_outputs:
        for name, is_asked, why in (
            ("beam_width", sampling.beam_width > 1, "beams take no grammar; ask for n answers"),
            ("min_tokens", sampling.min_tokens, "the grammar says where an answer ends"),
            ("ignore_eos", sampling.ignore_eos, "the grammar says where an answer ends"),
        ):
            if is_asked:
                _fail(name, f"cannot be combined with structured outputs: {why}")


def constraint(given: object, name: str = "structured_outputs") -> str:
    """The one thing that is asked of a text, as JSON: `{"json": schema}`, `{"regex": text}`,
    `{"choice": texts}`, `{"grammar": text}` or `{"structural_tag": ...}`. "" for nothing.
    RequestFault names what is wrong below `name`."""
    if given is None or given == "":
        return ""
    if isinstance(given, str):
        given = _parsed(given, name)
    if isinstance(given, StructuredOutputs):
        given = structs.asdict(given)
    if not isinstance(given, Mapping):
        _fail(name, "must be an object", "invalid_type")
    asked = made(StructuredOutputs, {k: v for k, v in given.items() if v is not None}, name)
    found = {k: v for k, v in structs.asdict(asked).items() if v is not None}
    if asked.json_object is False:
        del found["json_object"]
    if len(found) != 1:
        names = ", ".join(StructuredOutputs.__struct_fields__)
        _fail(name, f"needs one of {names}" + (", not several" if found else ""))
    if "json_object" in found:
        found = {"json": {"type": "object"}}
    if "json" in found:
        found["json"] = _schema(found["json"], f"{name}.json")
    try:
        text = msgspec.json.encode(found)
    except (TypeError, ValueError, UnicodeEncodeError, RecursionError) as problem:
        _fail(name, f"is no JSON: {problem}")
    if len(text) > MAX_CONSTRAINT_BYTES:
        _fail(name, f"has more than {MAX_CONSTRAINT_BYTES} bytes", LIMIT)
    return text.decode()


def _schema(given: object, name: str) -> object:
    """Of a Pydantic model its own schema, of a text what it says."""
    if callable(method := getattr(given, "model_json_schema", None)):
        given = method()
    if isinstance(given, str):
        given = _parsed(given, name)
    if not isinstance(given, (dict, bool)):
        _fail(name, "must be a JSON schema: an object, or true or false", "invalid_type")
    return given


def _parsed(text: str, name: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as problem:
        _fail(name, f"is no JSON: {problem}")


def biases(given: object) -> object:
    """Sorted pairs of token id and number, of a mapping or of such pairs."""
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        rows = [_pair(pair) for pair in islice(pairs, MAX_LOGIT_BIAS + 1)]  # type: ignore[call-overload]
        return tuple(sorted(dict(rows).items()))
    except (TypeError, ValueError):
        _fail("logit_bias", "must map token ids to numbers", "invalid_type")


def _pair(given: object) -> Any:
    return tuple(map(plain, given)) if isinstance(given, tuple) else given


def _texts(given: object) -> object:
    return (given,) if isinstance(given, str) else _listed(given, MAX_STOP_STRINGS)


def _stop_ids(given: object) -> object:
    ids = _listed(given, MAX_STOP_TOKEN_IDS)
    if isinstance(ids, list) and len(ids) > MAX_STOP_TOKEN_IDS:
        _fail("stop_token_ids", f"takes at most {MAX_STOP_TOKEN_IDS}", LIMIT)
    return ids


def _listed(given: object, most: int) -> object:
    """As a list of at most one more than may be, whatever kind of list it is."""
    if isinstance(given, (str, bytes, Mapping)) or not isinstance(given, Iterable):
        return plain(given)
    return list(map(plain, islice(given, most + 1)))


# Fields that may be given in other forms than the one that a record holds.
FORMS = {
    "stop": _texts,
    "stop_token_ids": _stop_ids,
    "logit_bias": biases,
    "structured_outputs": constraint,
}


# ---------------------------------------------------------------------- requests and their outputs


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability of one token and of the likeliest ones at its position, likeliest first.

    Taken from the log-softmax of the raw logits (before penalties, temperature and filters), as
    the field's servers do. `rank` counts from 1.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True, eq=False)
class Request:
    """One sequence in the engine. An answer with n > 1 is n requests that share their prompt.

    `sampling.stop_token_ids` already holds the model's end tokens, `max_tokens` and `seed` are
    set. `fork_of` names the request whose prompt blocks this one shares as soon as they are
    computed; if that request is gone, this one is served like any other. `tenant` says on whose
    behalf it is: shares of the engine are counted by tenant, and `weight` is how many times the
    share of an ordinary one it gets.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_time: float
    priority: int = 0
    cache_salt: bytes = b""
    fork_of: str | None = None
    tenant: bytes = b""
    weight: float = 1.0
    # How far it has got. Only the scheduler writes below this line.
    order: int = 0  # of arrival, from 1
    stop_token_ids: frozenset[int] = frozenset()  # those of `sampling`
    token_ids: list[int] = field(default_factory=list)  # prompt, then output
    draft_token_ids: tuple[int, ...] = ()  # drafts at what follows token_ids
    num_computed_tokens: int = 0  # planned; an upper bound while drafts are in flight
    num_done_tokens: int = 0  # of them, what collected steps are known to have written
    num_computable_tokens: int = 0  # nobody reads the last token of an answer
    num_tokens_with_slots: int = (
        0  # below this it may compute token by token, in blocks all its own
    )
    block_ids: list[list[int]] = field(default_factory=list)  # one table per KV group
    block_hashes: list[bytes] = field(default_factory=list)
    num_published_blocks: int = 0  # leading blocks that the prefix cache has been told of
    num_dropped_blocks: list[int] = field(default_factory=list)  # that left the window, per group
    num_cached_tokens: int = 0  # of the prompt, not computed by itself at first admission
    num_prompt_logprobs: int = 0  # delivered so far
    num_preemptions: int = 0
    sampling_step: int = 0  # of a pipeline: the last step planned that samples for it
    pool: int = 0  # of several: where its blocks are, or were last
    epoch: int = 0  # raised when its blocks go: a result of an older epoch has no place any more
    has_row: bool = False  # the executor keeps a row for it
    has_drafts: bool = False  # that row has drafts
    has_output: bool = False  # something was delivered
    is_ended: bool = False

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        """The one number the scheduler works on. Prefill, chunk, decode and
        recovery from preemption differ only in how large it is."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_known_tokens(self) -> int:
        tokens = self.token_ids
        n = len(tokens)
        while n and tokens[n - 1] == UNKNOWN_TOKEN:
            n -= 1
        return n

    @property
    def max_num_tokens(self) -> int:
        if self.sampling.max_tokens is None:
            raise RequestFault("max_tokens is not resolved", param="max_tokens")
        return len(self.prompt_token_ids) + self.sampling.max_tokens


class RequestOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one step (or an abort, or a fault) gave one request. Nothing follows a finish_reason.

    A stop token is part of `new_token_ids`. `prompt_logprobs` come with the chunk that computed
    them; the first prompt token has none. `error` is set with FinishReason.ERROR.
    `num_cached_tokens` is set on the first output alone. `beams` is set on the only output of a
    beam search: finished sequences, best first, each (token ids, score, log-probabilities of its
    tokens); `new_token_ids` are then those of the best. Of the drafts that the step checked,
    `num_accepted` are among the new tokens and `num_rejected` are not.
    """

    request_id: str
    new_token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    error: str | None = None
    beams: tuple[tuple[tuple[int, ...], float, tuple[TokenLogprobs, ...]], ...] = ()
    num_accepted: int = 0
    num_rejected: int = 0


def joined(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """One in the place of several of one request, in their order; at least one."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    return RequestOutput(
        last.request_id,
        tuple([token_id for output in outputs for token_id in output.new_token_ids]),
        last.finish_reason,
        tuple([entry for output in outputs for entry in output.logprobs]),
        tuple([entry for output in outputs for entry in output.prompt_logprobs]),
        max([output.num_cached_tokens for output in outputs]),
        last.error,
        last.beams,
        sum([output.num_accepted for output in outputs]),
        sum([output.num_rejected for output in outputs]),
    )
