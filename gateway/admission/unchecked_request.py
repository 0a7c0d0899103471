"""A caller's request before tokenisation, as both front ends (HTTP and gRPC) pass it on. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.admission.prompts import Chat
from gateway.generation import SpeculationOptions
from gateway.output_format import OutputFormat
from outrider.wire.requests.params import SamplingParams


@dataclass(frozen=True, slots=True)
class Infill:
    """A prompt that asks for the text between a given prefix and a given suffix."""

    prefix: str
    suffix: str


Prompt = str | tuple[int, ...] | Chat | Infill


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldNames:
    """Names, in the caller's protocol, of the request fields that error messages name."""

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
    """Model id that the request names; empty if the request leaves it to the gateway, which must then serve only one
    model."""
    prompts: tuple[Prompt, ...]
    names: FieldNames
    params: SamplingParams
    """Sampling parameters. `build_requests` fills in max_tokens, seed, choice, acceptance, lenience and grammar. Its
    bad_words holds only the bad words that the request gives as token ids."""
    max_tokens: int | None
    """Maximal number of output tokens; None for as many as the context limit leaves."""
    named: frozenset[str] | None = None
    """Names of the fields of `params` that the request sets. The defaults in the model's checkpoint apply to the other
    fields. None means that the request sets all."""
    seed: int | None
    """Seed of 64 bits; None to draw a seed for each prompt."""
    num_choices: int = 1
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    prediction: str = ""
    """Predicted output: text that the output may resemble. Empty without a prediction."""
    cache_salt: str | None = None
    user: str | None = None
    """Name of the end user among those who share an API key, for the settings `prefix_cache_scope` and `lookup_scope`;
    None if the request names none."""
    priority: int = 0
    """Priority among the requests of one caller; lower numbers leave the queue first."""
    max_tpot_ms: float | None = None
    """Time per output token that the request aims at, in milliseconds; None for no aim."""
    output: OutputFormat | None = None
    """Format that the outputs must have; None for any."""
    num_prompt_logprobs: int | None = None
    """Number of most likely ids whose log-probs are returned for each prompt token, besides those of the token itself;
    None for no log-probs of the prompt."""
    is_empty: bool = False
    """Whether the outputs must be empty, as max_tokens 0 asks for."""
    keeps_stop: bool = False
    """Whether an output's text has the stop string or stop id that ends it."""
    stops_in_reasoning: bool = False
    """Whether stop strings also end an output within its reasoning."""
    shows_special: bool = False
    """Whether special tokens are part of the output text."""
    adds_special: bool | None = None
    """Whether the tokenizer adds its own special tokens to prompts. None: it adds them to texts but not to chats, whose
    template writes them."""
    max_prompt_tokens: int | None = None
    """Number of tokens at the end of a prompt that are used. -1: as many as fit the context. None: the whole prompt."""

    @property
    def num_all_choices(self) -> int:
        """Number of choices of all prompts together."""
        return len(self.prompts) * self.num_choices
