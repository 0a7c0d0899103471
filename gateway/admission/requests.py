"""Turns a caller's `Demand` into `GenerationRequest`s. HTTP and gRPC each translate their messages to a `Demand`.

Every refusal is an InvalidRequest (or a ModelNotFound) that names the field as the caller spelt it.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from hashlib import blake2b

from gateway.admission.prompts import Chat, PromptReader
from gateway.generation import (
    AcceptanceRule,
    DraftLogprobs,
    GenerationRequest,
    ServedFacts,
    SpeculationOptions,
)
from gateway.grammar_checker import GrammarChecker
from gateway.infill import infill_marks
from gateway.output_format import OutputFormat
from gateway.tokenizer import Tokenizer
from gateway.tools.offer import ToolOffer
from gateway.tools.reading import Reading, grammar_request, reading_of
from outrider.wire.errors import ContextExceeded, InvalidRequest, ModelNotFound
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import (
    CHOICES,
    LOGPROBS,
    MAX_BAD_WORDS,
    Range,
    SamplingParams,
    check_cache_salt,
    check_token_ids,
)
from outrider.wire.requests.sampling_defaults import MAX_TOKENS, apply_defaults
from outrider.wire.requests.scheduling import MAX_TPOT_MS, PRIORITY, Scheduling
from outrider.wire.requests.speculation import check_what_is_drafted
from outrider.wire.settings.config import GatewayConfig

_DIGEST_BYTES = 32


def salt_of(scope: str, key_name: str | None, user: str | None, salt: str | None) -> bytes:
    """Return the digest under which requests share cached prefixes: 32 bytes, or empty for those shared by everybody.

    scope: the setting `prefix_cache_scope`. Under `user` a request without key, user and salt gets a random digest and
    shares with nobody: requests that cannot be told apart must not learn of each other from timing.
    """
    if scope == "user":
        return _identity(key_name, user, salt) or secrets.token_bytes(_DIGEST_BYTES)
    if scope == "key" and key_name is not None:
        return _identity(key_name, None, salt)
    return b"" if salt is None else _digest(b"salt", salt)


def corpus_of(scope: str, key_name: str | None, user: str | None, salt: str | None, *, may_read: bool = False) -> bytes:
    """Return the digest under which `lookup` requests share a corpus: 32 bytes, or empty for no sharing.

    A request with an empty digest copies from itself alone and is not remembered.

    scope: the setting `lookup_scope`. Under `user` a request without key, user and salt gets an empty digest. may_read:
    whether the request could read the tokens that are copied. `explain` shows them, and under lenience the target
    accepts tokens that it would not have produced. Such a request gets an empty digest where callers share a corpus.
    """
    if scope == "user":
        return _identity(key_name, user, salt)
    return b"" if may_read else _digest(b"salt", salt or "")


def _identity(key_name: str | None, user: str | None, salt: str | None) -> bytes:
    if key_name is not None:
        return _digest(b"key", key_name, user or "", salt or "")
    if user is not None:
        return _digest(b"user", user, salt or "")
    return b"" if salt is None else _digest(b"anonymous", salt)


def caller_of(key_name: str | None, salt: str | None) -> bytes:
    """Return the digest by which workers distinguish callers: 32 bytes, or empty without an API key and a salt."""
    if key_name is not None:
        return _digest(b"key", key_name)
    return b"" if salt is None else _digest(b"salt", salt)


def _digest(kind: bytes, *parts: str) -> bytes:
    """Each part is hashed by its own digest, so that no two lists of parts give the same result."""
    found = blake2b(digest_size=_DIGEST_BYTES, person=kind)
    for part in parts:
        found.update(blake2b(part.encode()).digest())
    return found.digest()


MAX_STOPS = 16
"""Maximal number of stop strings of a request."""
MAX_STOP_CHARS = 1024
"""Maximal length of a stop string or bad word, in characters."""
MAX_MESSAGES = 4096
"""Maximal number of messages of a chat. The template iterates over them in Python."""
MAX_USER_CHARS = 1024
"""Maximal length of `user`, in characters."""
MAX_ECHO_CHARS = 200
"""Maximal length of a caller's text that an error quotes, in characters."""
MAX_PROMPT_LOGPROBS = 1 << 20
"""Maximal number of prompt log-probs that one request returns. A prompt of 32k tokens with the 20 best ids each has 0.7
million, which take 5 MB from the target, and 300 MB and 0.9 s of the gateway (one /v1/completions with prompt_logprobs
20)."""


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
class Demand:
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
    most_prompt_tokens: int | None = None
    """Number of tokens at the end of a prompt that are used; -1 for those that fit the context, None for the whole
    prompt."""

    @property
    def num_answers(self) -> int:
        """Number of choices over all prompts."""
        return len(self.prompts) * self.num_choices


async def build_requests(
    demand: Demand,
    facts: ServedFacts,
    reader: PromptReader,
    config: GatewayConfig,
    checker: GrammarChecker,
    key_name: str | None = None,
    weight: float = 1.0,
) -> tuple[GenerationRequest, ...]:
    """Return one request per choice; `prompt * num_choices + choice` is the index of each.

    Chats are rendered and grammars are checked in other processes. Long texts are tokenised on threads.

    demand: must have passed `check_demand`. key_name, weight: name and weight of the caller's API key.

    Raises InvalidRequest, and ContextExceeded for a prompt that does not fit.

        # 2 prompts with n = 3: the last choice of the second prompt has index 1 * 3 + 2 = 5
    """
    options = demand.speculation
    check_what_is_drafted(
        options.num_draft_tokens, options.tree, options.drafter, config.max_draft_tokens, "speculation."
    )
    num_chars = 2 * sum(map(len, demand.bad_words))
    words = await reader.work(num_chars, bad_word_ids, demand.bad_words, reader.tokenizer)
    for word in words:
        check_rows("bad_words", word, facts.vocab_size, reader.tokenizer)
    rule = _acceptance(demand.speculation, config)
    lenience = _lenience(demand.speculation, config)
    grammars = CallerGrammars(checker, caller_of(key_name, None))
    grammar = await grammars.output(demand.output)
    params = demand.params
    if demand.named is not None:
        params = apply_defaults(params, demand.named, facts.sampling_defaults)
    base = dataclasses.replace(
        params, bad_words=(*params.bad_words, *words), acceptance=rule, lenience=lenience, grammar=grammar
    )
    # Once, before prompts cost anything; of each prompt only what its length decides is checked again.
    most = 1 if base.beams is not None else facts.context_limit
    if demand.max_tokens is not None:
        most = min(demand.max_tokens, facts.context_limit)
    dataclasses.replace(base, max_tokens=most).check(facts.vocab_size)
    prediction_ids: tuple[int, ...] = ()
    if demand.prediction and _uses_prediction(demand.speculation, config):
        prediction_ids = await _prediction_ids(demand, facts, reader)
    salt = salt_of(config.prefix_cache_scope, key_name, demand.user, demand.cache_salt)
    corpus_id = corpus_of(
        config.lookup_scope,
        key_name,
        demand.user,
        demand.cache_salt,
        may_read=demand.speculation.explain or lenience < 1.0,
    )
    scheduling = Scheduling(caller_of(key_name, demand.cache_salt), weight, demand.priority, demand.max_tpot_ms)
    requests: list[GenerationRequest] = []
    for prompt in demand.prompts:
        prepared = await _prepare(
            prompt,
            reader,
            demand.names.prompt,
            grammars,
            base.grammar,
            demand.adds_special,
            _max_prompt_tokens(demand, facts),
        )
        if not isinstance(prompt, tuple):
            check_rows(demand.names.prompt, prepared.ids, facts.vocab_size, reader.tokenizer)
        special_ids = reader.tokenizer.special_ids
        requests += _answers(
            demand,
            facts,
            base,
            prepared,
            prediction_ids,
            salt,
            corpus_id,
            key_name,
            scheduling,
            special_ids,
            may_be_cut=config.max_tokens_beyond_context == "clamp",
        )
    return tuple(requests)


async def prompt_ids(
    demand: Demand, reader: PromptReader, checker: GrammarChecker, key_name: str | None
) -> tuple[int, ...]:
    """Return the token ids of the demand's only chat, without generating an answer.

    Raises InvalidRequest, also for an output format that cannot be enforced.
    """
    (chat,) = demand.prompts
    grammars = CallerGrammars(checker, caller_of(key_name, None))
    grammar = await grammars.output(demand.output)
    return (await _prepare(chat, reader, demand.names.prompt, grammars, grammar)).ids


@dataclass(frozen=True, slots=True)
class CallerGrammars:
    """Checker of the grammars of one caller's requests."""

    checker: GrammarChecker
    caller: bytes
    """Digest of the caller's API key, empty without one. The checks are charged to the caller's share of the checker.
    """

    async def output(self, output: OutputFormat | None) -> str:
        """Return the grammar of an output format, empty for None. Raises InvalidRequest."""
        return "" if output is None else await self.checker.output(self.caller, output)

    async def tools(self, offer: ToolOffer, reading: Reading, tokenizer: Tokenizer, answer: str) -> str:
        """Return the grammar of a whole output that may call the offered tools. Raises InvalidRequest.

        answer: grammar of an output without calls; empty for any text.
        """
        request = grammar_request(offer, reading, tokenizer, answer)
        return answer if request is None else await self.checker.tools(self.caller, request)


def _acceptance(options: SpeculationOptions, config: GatewayConfig) -> AcceptanceRule:
    """A request that asks for lenience alone gets the `rejection` rule, which is the one that has lenience."""
    if options.acceptance is not None:
        return options.acceptance
    is_lenient = options.lenience is not None and options.lenience < 1.0
    return AcceptanceRule.REJECTION if is_lenient else AcceptanceRule[config.acceptance.upper()]


def _lenience(options: SpeculationOptions, config: GatewayConfig) -> float:
    lenience = 1.0 if options.lenience is None else options.lenience
    return 1.0 if _is_plain(options, config) and 0.0 < lenience < 1.0 else lenience


def _is_plain(options: SpeculationOptions, config: GatewayConfig) -> bool:
    return options.num_draft_tokens_or(config.num_draft_tokens) == 0


def _uses_prediction(options: SpeculationOptions, config: GatewayConfig) -> bool:
    return not _is_plain(options, config) and (
        options.drafter in (None, Drafter.AUTO) or options.drafter.needs_prediction
    )


def wanted_model(served: Sequence[ServedFacts], name: str) -> ServedFacts:
    """Return the model that a request asks for: the one of this id, or the only one served if `name` is empty.

    Raises InvalidRequest if no model is named and several are served, ModelNotFound for an unknown id.
    """
    if name or not served:
        return find_model(served, name)
    if len(served) > 1:
        known = ", ".join(repr(facts.id) for facts in served)
        raise InvalidRequest(f"model is missing, and several are served here: {known}; name one", param="model")
    return served[0]


def find_model(served: Sequence[ServedFacts], name: str) -> ServedFacts:
    """Return the model of this id, or the one that was started from this path or hub id.

    Raises ModelNotFound, which lists the served models.
    """
    for facts in served:
        if facts.id == name:
            return facts
    for facts in served:
        if facts.is_at(name):
            return facts
    known = ", ".join(repr(facts.id) for facts in served)
    shown = repr(name[:MAX_ECHO_CHARS]) + ("..." if len(name) > MAX_ECHO_CHARS else "")
    raise ModelNotFound(f"the model {shown} does not exist; served here: {known}", param="model")


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word at the start of a text and, where they differ, after a space (as vLLM).

    Raises InvalidRequest for a word of white space alone.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.strip()
        if not bare:
            raise InvalidRequest(f"bad_words holds {word!r}, which is no word", param="bad_words")
        for text in (bare, f" {bare}"):
            found[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(found)


def check_rows(name: str, ids: Sequence[int], vocab_size: int, tokenizer: Tokenizer) -> None:
    """Raise InvalidRequest that names the first token id at or above `vocab_size`.

    A model may have fewer rows of logits than its tokenizer has ids.
    """
    for token_id in ids:
        if token_id >= vocab_size:
            raise InvalidRequest(
                f"{name} needs the token {tokenizer.token_name(token_id)!r} ({token_id}), and the model has rows for "
                f"the ids up to {vocab_size - 1} alone; leave it out",
                param=name,
            )


def check_demand(demand: Demand, served: Sequence[ServedFacts]) -> ServedFacts:
    """Check everything that needs no tokens, before any expensive work. Return the requested model.

    Raises InvalidRequest or ModelNotFound.
    """
    facts = wanted_model(served, demand.model)
    names, num_choices = demand.names, demand.num_choices
    CHOICES.check(names.num_choices, num_choices)
    if demand.max_tokens is not None:
        Range(1, max(facts.context_limit, demand.max_tokens)).check(names.max_tokens, demand.max_tokens)
    if demand.params.num_logprobs is not None:
        LOGPROBS.check(names.num_logprobs, demand.params.num_logprobs)
    _check_scored(demand, facts)
    if demand.most_prompt_tokens is not None:
        name = "truncate_prompt_tokens"
        if demand.most_prompt_tokens == 0:
            raise InvalidRequest(f"{name} is 0, which leaves nothing of a prompt; give more, or -1", param=name)
        Range(-1, facts.context_limit).check(name, demand.most_prompt_tokens)
        if demand.most_prompt_tokens == -1 and (demand.max_tokens or 1) >= facts.context_limit:
            raise InvalidRequest(
                f"{name} is -1 and {names.max_tokens} is {demand.max_tokens}, which leaves nothing of the context "
                f"limit, {facts.context_limit}, to a prompt; give fewer, or say how many of the prompt are taken",
                param=name,
            )
        if any(isinstance(prompt, Infill) for prompt in demand.prompts):
            why = f"{name} would cut off what marks the prefix of a prompt with a suffix; leave one out"
            raise InvalidRequest(why, param=name)
    if not demand.prompts:
        raise InvalidRequest(f"{names.prompt} is an empty list", param=names.prompt)
    if demand.num_answers > facts.max_answers:
        raise InvalidRequest(
            f"{len(demand.prompts)} prompts times {names.num_choices} = {num_choices} are {demand.num_answers} "
            f"answers, this server takes at most {facts.max_answers} at once; split the request",
            param=names.prompt if len(demand.prompts) > 1 else names.num_choices,
        )
    for prompt in demand.prompts:
        if isinstance(prompt, Chat) and len(prompt.messages) > MAX_MESSAGES:
            raise InvalidRequest(
                f"{names.prompt} has {len(prompt.messages)} messages, at most {MAX_MESSAGES} are allowed",
                param=names.prompt,
            )
    _check_texts(names.stop, "strings", demand.stop, MAX_STOPS)
    _check_texts("bad_words", "entries", demand.bad_words, MAX_BAD_WORDS)
    if demand.cache_salt is not None:
        check_cache_salt(demand.cache_salt)
    PRIORITY.check("priority", demand.priority)
    if demand.max_tpot_ms is not None:
        MAX_TPOT_MS.check("max_tpot_ms", demand.max_tpot_ms)
    if demand.user is not None and len(demand.user) > MAX_USER_CHARS:
        raise InvalidRequest(
            f"user has {len(demand.user)} characters, at most {MAX_USER_CHARS} are allowed", param="user"
        )
    _check_speculation(demand.speculation, facts.vocab_size)
    _check_drafter(demand.speculation.drafter, facts)
    _check_predicted(demand)
    _check_tree(demand.speculation, facts)
    _check_beams(demand, facts)
    return facts


def _check_scored(demand: Demand, facts: ServedFacts) -> None:
    if demand.num_prompt_logprobs is None:
        return
    LOGPROBS.check("prompt_logprobs", demand.num_prompt_logprobs)
    if facts.decoder_start_ids:
        raise InvalidRequest(
            "prompt_logprobs, or echo with logprobs, is given, and this model's prompts are read by an encoder, which "
            "says no log-probs; leave it out",
            param="prompt_logprobs",
        )


def _check_num_scores(demand: Demand, num_prompt: int) -> None:
    if demand.num_prompt_logprobs is None:
        return
    num_best, num_answers = demand.num_prompt_logprobs, demand.num_answers
    num_scores = num_prompt * (num_best + 1) * num_answers
    if num_scores > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs, or logprobs with echo, is {num_best}, which of a prompt of {num_prompt} tokens and "
            f"{num_answers} answers makes {num_scores} log-probs, at most {MAX_PROMPT_LOGPROBS} are told; ask for "
            "fewer, or split the request",
            param="prompt_logprobs",
        )


def _check_texts(name: str, what: str, texts: tuple[str, ...], most: int) -> None:
    if len(texts) > most:
        raise InvalidRequest(f"{name} has {len(texts)} {what}, at most {most} are allowed", param=name)
    for text in texts:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidRequest(
                f"{name} holds a string of {len(text)} characters, must have 1 to {MAX_STOP_CHARS}", param=name
            )


def _check_speculation(options: SpeculationOptions, vocab_size: int) -> None:
    topk = options.draft_topk
    if topk is None:
        return
    if options.draft_logprobs is not DraftLogprobs.TOPK:
        raise InvalidRequest(
            "speculation.draft_topk needs speculation.draft_logprobs to be topk", param="speculation.draft_topk"
        )
    Range(1, vocab_size, remedy=", the vocabulary").check(
        "speculation.draft_logprobs: topk", topk, "speculation.draft_logprobs"
    )


def _check_drafter(drafter: Drafter | None, facts: ServedFacts) -> None:
    """A drafter whose worker is away passes: it may be back, and its rounds have no drafts meanwhile."""
    if drafter is None or drafter in facts.drafters:
        return
    raise InvalidRequest(
        f"speculation.drafter is {drafter}, which neither target nor draft of {facts.id} has; offered: "
        f"{', '.join(facts.drafters) or 'none'}{drafter.remedy}",
        param="speculation.drafter",
    )


def _check_predicted(demand: Demand) -> None:
    drafter = demand.speculation.drafter
    if drafter is not None and drafter.needs_prediction and not demand.prediction:
        raise InvalidRequest(
            f"speculation.drafter is {drafter} and {demand.names.prediction} is empty; give one, or name another "
            "drafter",
            param="speculation.drafter",
        )


def _check_tree(options: SpeculationOptions, facts: ServedFacts) -> None:
    if options.tree is None:
        return
    shown, name = f"speculation.tree is {options.tree}", "speculation.tree"
    if options.lenience is not None and options.lenience < 1.0:
        raise InvalidRequest(
            f"{shown} and lenience {options.lenience:g}, which is of chains alone; leave one out", param=name
        )
    if facts.no_trees is not None:
        raise InvalidRequest(f"{shown}, and {facts.no_trees}; give num_draft_tokens instead", param=name)


def _check_beams(demand: Demand, facts: ServedFacts) -> None:
    beams, options, names = demand.params.beams, demand.speculation, demand.names
    if beams is None:
        return
    beams.check(facts.vocab_size, names.num_choices)
    if facts.no_beams is not None:
        raise InvalidRequest(f"use_beam_search is true, and {facts.no_beams}; leave it out", param="use_beam_search")
    beside = {
        "stop": bool(demand.stop),
        "bad_words": bool(demand.bad_words),
        names.num_logprobs: demand.params.num_logprobs is not None,
        "prompt_logprobs": demand.num_prompt_logprobs is not None,
        "max_tokens 0": demand.is_empty,
        "response_format" if demand.output is None else demand.output.param: demand.output is not None,
        "tools": any(isinstance(each, Chat) and each.tools is not None and each.tools.tools for each in demand.prompts),
        names.prediction: bool(demand.prediction),
        "speculation.tree": options.tree is not None,
        "speculation.lenience": options.lenience is not None and options.lenience < 1.0,
        "speculation.drafter": options.drafter not in (None, Drafter.AUTO, Drafter.MODEL),
        "speculation.explain": options.explain,
    }
    for name in (name for name, is_given in beside.items() if is_given):
        raise InvalidRequest(
            f"{name} and use_beam_search do not go together; leave one of them out",
            param=name,
        )


async def _prediction_ids(demand: Demand, facts: ServedFacts, reader: PromptReader) -> tuple[int, ...]:
    name, tokenizer = demand.names.prediction, reader.tokenizer
    ids = await reader.first_ids(demand.prediction, facts.context_limit)  # no output is longer
    special = map(tokenizer.token_text, sorted(tokenizer.special_ids.intersection(ids)))
    written = next((text for text in special if text in demand.prediction), None)  # an unknown word is none
    if written is not None:
        raise InvalidRequest(f"{name} holds {written!r}, a special token, which is no text; leave it out", param=name)
    check_rows(name, ids, facts.vocab_size, tokenizer)
    return ids


@dataclass(frozen=True, slots=True)
class _Prepared:
    ids: tuple[int, ...]
    grammar: str
    reading: Reading | None = None


async def _prepare(
    prompt: Prompt,
    reader: PromptReader,
    name: str,
    grammars: CallerGrammars,
    grammar: str,
    adds_special: bool | None = None,
    max_ids: int | None = None,
) -> _Prepared:
    if isinstance(prompt, Chat):
        prepared = await _prepare_chat(prompt, reader, name, grammars, grammar, bool(adds_special), max_ids)
    elif isinstance(prompt, Infill):
        before, between, behind = infill_marks(reader.tokenizer)
        begin = reader.tokenizer.encode("")  # what the tokenizer puts in front of every text
        first = await reader.encode(name, prompt.prefix, False)
        last = await reader.encode("suffix", prompt.suffix, False)
        prepared = _Prepared((*begin, before, *first, between, *last, behind), grammar)
    elif isinstance(prompt, str):
        prepared = _Prepared(await reader.encode(name, prompt, adds_special is not False, max_ids), grammar)
    else:
        prepared = _Prepared(prompt if max_ids is None else prompt[-max_ids:], grammar)
    if not prepared.ids:
        raise InvalidRequest(f"{name} is empty: at least one token is needed to continue from", param=name)
    return prepared


async def _prepare_chat(
    chat: Chat,
    reader: PromptReader,
    name: str,
    grammars: CallerGrammars,
    grammar: str,
    adds_special: bool,
    max_ids: int | None,
) -> _Prepared:
    pieces = await reader.render_pieces(name, chat, is_cut=max_ids is not None)
    reading = None
    ids = await reader.encode_chat(name, pieces, adds_special, max_ids)
    if chat.tools is not None:
        reading = reading_of(chat.tools, reader.tokenizer, pieces[-1])
        if reading is not None:
            grammar = await grammars.tools(chat.tools, reading, reader.tokenizer, grammar)
    return _Prepared(ids, grammar, reading)


def _answers(
    demand: Demand,
    facts: ServedFacts,
    base: SamplingParams,
    prepared: _Prepared,
    prediction_ids: tuple[int, ...],
    salt: bytes,
    corpus_id: bytes,
    key_name: str | None,
    scheduling: Scheduling,
    special_ids: Set[int],
    *,
    may_be_cut: bool,
) -> list[GenerationRequest]:
    ids = prepared.ids
    if prepared.grammar and demand.params.ignore_eos:
        what = "tools" if demand.output is None else demand.output.param
        raise InvalidRequest(
            f"ignore_eos is true and {what} says what the answer has to be, which then could not end where it is "
            "complete; leave one out",
            param="ignore_eos",
        )
    source_ids: tuple[int, ...] = ()
    if facts.decoder_start_ids:
        _check_source(demand, facts.context_limit, len(ids))
        source_ids, ids = ids, facts.decoder_start_ids
    max_tokens = _max_tokens(demand, facts, len(ids), may_be_cut)
    check_token_ids(demand.names.prompt, source_ids or ids, facts.vocab_size)
    _check_num_scores(demand, len(ids))
    # 53 bits: the seed is reported, and JSON numbers lose more in many clients.
    seed = secrets.randbits(53) if demand.seed is None else demand.seed
    params = dataclasses.replace(base, max_tokens=max_tokens, seed=seed, grammar=prepared.grammar)
    if params.min_tokens > max_tokens or params.beams is not None:
        params.check(facts.vocab_size)
    answer_stop_ids: frozenset[int] = frozenset()
    may_reason = prepared.reading is not None and prepared.reading.marks is not None
    if may_reason and not demand.stops_in_reasoning and params.beams is None:
        answer_stop_ids = frozenset(params.stop_token_ids) - special_ids
        at_once = tuple(each for each in params.stop_token_ids if each in special_ids)
        params = dataclasses.replace(params, stop_token_ids=at_once)
    return [
        GenerationRequest(
            request_id=demand.request_id,
            model=facts.id,
            prompt_ids=ids,
            source_ids=source_ids,
            params=dataclasses.replace(params, choice=choice),
            stop=demand.stop,
            speculation=demand.speculation,
            prediction_ids=prediction_ids,
            cache_salt=salt,
            corpus_id=corpus_id,
            key_name=key_name,
            scheduling=scheduling,
            reading=prepared.reading,
            num_prompt_logprobs=demand.num_prompt_logprobs if choice == 0 else None,  # all choices tell its scores
            is_empty=demand.is_empty,
            keeps_stop=demand.keeps_stop,
            answer_stop_ids=answer_stop_ids,
            stops_in_reasoning=demand.stops_in_reasoning,
            shows_special=demand.shows_special,
        )
        for choice in range(demand.num_choices)
    ]


def _max_prompt_tokens(demand: Demand, facts: ServedFacts) -> int | None:
    most = demand.most_prompt_tokens
    if most == -1:
        most = facts.context_limit - (0 if facts.decoder_start_ids else demand.max_tokens or 1)
    return None if most is None else max(1, most)


def _check_source(demand: Demand, context_limit: int, num_source: int) -> None:
    if num_source > context_limit:
        raise ContextExceeded(
            f"{demand.names.prompt} has {num_source} tokens, the encoder reads at most {context_limit}; shorten it",
            param=demand.names.prompt,
        )


def _max_tokens(demand: Demand, facts: ServedFacts, num_prompt: int, may_be_cut: bool) -> int:
    """may_be_cut: whether a larger max_tokens is lowered to the tokens that the context leaves, rather than refused."""
    context_limit, name = facts.context_limit, demand.names.prompt
    left = context_limit - num_prompt
    if left < 1:
        raise ContextExceeded(
            f"{name} has {num_prompt} tokens, the context limit is {context_limit} for prompt and output together; "
            "shorten it",
            param=name,
        )
    if demand.params.min_tokens > left:
        raise InvalidRequest(
            f"min_tokens is {demand.params.min_tokens}, and {name} has {num_prompt} tokens, of the context limit "
            f"{context_limit} at most {left} can follow; lower it, or shorten {name}",
            param="min_tokens",
        )
    if demand.max_tokens is None:
        stated = left if demand.named is None else facts.sampling_defaults.get(MAX_TOKENS, left)
        return max(min(left, int(stated)), demand.params.min_tokens)
    if may_be_cut and demand.max_tokens > left:
        return left
    if demand.max_tokens > left:
        raise ContextExceeded(
            f"{name} has {num_prompt} tokens and {demand.names.max_tokens} is {demand.max_tokens}, together "
            f"{num_prompt + demand.max_tokens}; the context limit is {context_limit}, so at most {left} can follow",
            param=demand.names.max_tokens,
        )
    return demand.max_tokens
