"""A caller's request before tokenisation: the values to which HTTP and gRPC each translate their messages. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.admission.prompts import Chat
from gateway.generation import SpeculationOptions
from gateway.output_format import OutputFormat
from outrider.wire.requests.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Infill:
    """A prompt that asks for the text between a prefix and a suffix."""

    prefix: str
    suffix: str


Prompt = str | tuple[int, ...] | Chat | Infill


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldNames:
    """Names of the request fields that errors mention, as the caller's protocol spells them."""

    prompt: str
    prediction: str = "prediction"
    num_choices: str = "n"
    max_tokens: str = "max_tokens"
    num_logprobs: str = "logprobs"
    stop: str = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class UncheckedRequest:
    """A caller's request before tokenisation and before the model's limits are known."""

    request_id: str
    model: str
    """Id of the requested model; empty for the only one served."""
    prompts: tuple[Prompt, ...]
    names: FieldNames
    params: SamplingParams
    """Sampling parameters. `build_requests` fills in max_tokens, seed, choice, acceptance, lenience and grammar.
    bad_words holds those that were given as ids."""
    max_tokens: int | None
    """Maximal number of output tokens; None for all that the context leaves."""
    named: frozenset[str] | None = None
    """Fields of `params` that the request names. The checkpoint's defaults apply to the other fields. None means that
    all fields are named."""
    seed: int | None
    """Seed of 64 bits; None to draw one for each prompt."""
    num_choices: int = 1
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    prediction: str = ""
    """Text that the output may resemble."""
    cache_salt: str | None = None
    user: str | None = None
    """Name of the user among those of one API key, for `prefix_cache_scope` and `lookup_scope`."""
    priority: int = 0
    """Priority among the requests of one caller; lower numbers go first."""
    max_tpot_ms: float | None = None
    """Target for the time per output token, in milliseconds."""
    output: OutputFormat | None = None
    """Format that the outputs must have; None for any."""
    num_prompt_logprobs: int | None = None
    """Same as in GenerationRequest; so are `is_empty`, `keeps_stop`, `stops_in_reasoning` and `shows_special`."""
    is_empty: bool = False
    keeps_stop: bool = False
    stops_in_reasoning: bool = False
    shows_special: bool = False
    adds_special: bool | None = None
    """Whether the tokenizer adds its own special tokens to prompts. None adds them to texts but not to chats, whose
    template writes them."""
    max_prompt_tokens: int | None = None
    """Number of tokens at the end of a prompt that are used; -1 for those that fit the context, None for the whole
    prompt."""

    @property
    def num_answers(self) -> int:
        """Number of choices over all prompts."""
        return len(self.prompts) * self.num_choices
