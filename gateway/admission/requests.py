"""Makes `GenerationRequest`s of what a caller asked for. Both front ends translate to a `Demand`; the rest is here.

Every refusal is an InvalidRequest (or ModelNotFound) that names the field as the caller spelt it.
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
    """Return the digest under which requests share cached prefixes: 32 bytes, or none for what everybody shares.

    scope: `prefix_cache_scope`. Under `user` a request without key, user and salt shares with nobody: what cannot be
    told apart must not be guessed from its timing.
    """
    if scope == "user":
        return _identity(key_name, user, salt) or secrets.token_bytes(_DIGEST_BYTES)
    if scope == "key" and key_name is not None:
        return _identity(key_name, None, salt)
    return b"" if salt is None else _digest(b"salt", salt)


def corpus_of(scope: str, key_name: str | None, user: str | None, salt: str | None, *, may_read: bool = False) -> bytes:
    """Return the digest under which requests share what `lookup` copies from: 32 bytes, or none for one that copies
    from itself alone and is not remembered.

    scope: `lookup_scope`. Under `user` a request without key, user and salt has none. may_read: the request could read
    what is copied: `explain` shows it, and with lenience the target keeps what it would not have said. Where callers
    share, such a request has none.
    """
    if scope == "user":
        return _identity(key_name, user, salt)
    return b"" if may_read else _digest(b"salt", salt or "")


def _identity(key_name: str | None, user: str | None, salt: str | None) -> bytes:
    """Return the digest of who asks, the same for no two of them: no key can name what is another's. Empty where a
    request says nothing of it.
    """
    if key_name is not None:
        return _digest(b"key", key_name, user or "", salt or "")
    if user is not None:
        return _digest(b"user", user, salt or "")
    return b"" if salt is None else _digest(b"anonymous", salt)


def caller_of(key_name: str | None, salt: str | None) -> bytes:
    """Return by what workers tell callers apart: 32 bytes, or none for all that have no API key and name no salt."""
    if key_name is not None:
        return _digest(b"key", key_name)
    return b"" if salt is None else _digest(b"salt", salt)


def _digest(kind: bytes, *parts: str) -> bytes:
    """Take each part by its own digest, so that no two lists of parts read the same."""
    found = blake2b(digest_size=_DIGEST_BYTES, person=kind)
    for part in parts:
        found.update(blake2b(part.encode()).digest())
    return found.digest()


MAX_STOPS = 16
MAX_STOP_CHARS = 1024
"""Of a stop string or bad word."""
MAX_MESSAGES = 4096
"""Of a chat: a template walks through them in Python."""
MAX_USER_CHARS = 1024
MAX_ECHO_CHARS = 200
"""Of what a caller sent, in an error that quotes it."""
MAX_PROMPT_LOGPROBS = 1 << 20
"""Log-probs of prompts that one request is told. A prompt of 32k tokens with 20 best each has 0.7 million, which are 5
MB from the target, and 300 MB and 0.9 s of the gateway (one /v1/completions with prompt_logprobs 20)."""


@dataclass(frozen=True, slots=True)
class Infill:
    """A prompt that asks for what stands between two texts."""

    prefix: str
    suffix: str


Prompt = str | tuple[int, ...] | Chat | Infill


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldNames:
    """How the caller's protocol spells what a message may have to name."""

    prompt: str
    prediction: str = "prediction"
    num_choices: str = "n"
    max_tokens: str = "max_tokens"
    num_logprobs: str = "logprobs"
    stop: str = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a caller asked for, before tokenisation and before the model's limits are known."""

    request_id: str
    model: str
    """Empty = the only one."""
    prompts: tuple[Prompt, ...]
    names: FieldNames
    params: SamplingParams
    """max_tokens, seed, choice, acceptance, lenience and grammar are filled in here; bad_words hold those given as
    ids."""
    max_tokens: int | None
    """None = what the context leaves."""
    named: frozenset[str] | None = None
    """Fields of `params` that the request names: those that the checkpoint states apply to others. None = all."""
    seed: int | None
    """64 bits; None = one is drawn for each prompt."""
    num_choices: int = 1
    stop: tuple[str, ...] = ()
    bad_words: tuple[str, ...] = ()
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)
    prediction: str = ""
    """What the output may be like."""
    cache_salt: str | None = None
    user: str | None = None
    """Who asks, of one key; for `prefix_cache_scope` and `lookup_scope`."""
    priority: int = 0
    """Among the requests of a caller those with a lower number go first."""
    max_tpot_ms: float | None = None
    """How long a token should take at most."""
    output: OutputFormat | None = None
    """What the answers have to be; None = anything."""
    num_prompt_logprobs: int | None = None
    """As in GenerationRequest, as are the next four."""
    is_empty: bool = False
    keeps_stop: bool = False
    stops_in_reasoning: bool = False
    shows_special: bool = False
    adds_special: bool | None = None
    """Whether the tokenizer's own tokens are added to prompts; None = to texts, but not to chats, whose template writes
    them."""
    most_prompt_tokens: int | None = None
    """Of a longer prompt the last so many are taken; -1 = those that fit the context. None = nothing is cut."""

    @property
    def num_answers(self) -> int:
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
    """Return one request an answer: `prompt * num_choices + choice` stands at that index. Chats are rendered
    and grammars checked in other processes, long texts tokenised on threads.

    `demand` has passed `check_demand`; key_name, weight: of the API key that asks.
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
    """Return the tokens of the chat of a demand that nothing is to be generated for. Raises InvalidRequest, also for
    what its answer cannot be held to.
    """
    (chat,) = demand.prompts
    grammars = CallerGrammars(checker, caller_of(key_name, None))
    grammar = await grammars.output(demand.output)
    return (await _prepare(chat, reader, demand.names.prompt, grammars, grammar)).ids


@dataclass(frozen=True, slots=True)
class CallerGrammars:
    """Checks the grammars of one caller's requests."""

    checker: GrammarChecker
    caller: bytes
    """Whose share of the checking it takes: of an API key, or of all that have none."""

    async def output(self, output: OutputFormat | None) -> str:
        """Return the grammar of an output, empty for None. Raises InvalidRequest."""
        return "" if output is None else await self.checker.output(self.caller, output)

    async def tools(self, offer: ToolOffer, reading: Reading, tokenizer: Tokenizer, answer: str) -> str:
        """Return the grammar of a whole answer to this offer. answer: that of one that is no call, empty = any."""
        request = grammar_request(offer, reading, tokenizer, answer)
        return answer if request is None else await self.checker.tools(self.caller, request)


def _acceptance(options: SpeculationOptions, config: GatewayConfig) -> AcceptanceRule:
    """Return the rule; who asks for lenience alone asks for the rule that has it."""
    if options.acceptance is not None:
        return options.acceptance
    is_lenient = options.lenience is not None and options.lenience < 1.0
    return AcceptanceRule.REJECTION if is_lenient else AcceptanceRule[config.acceptance.upper()]


def _lenience(options: SpeculationOptions, config: GatewayConfig) -> float:
    """Return the lenience, 1 where nothing is drafted."""
    lenience = 1.0 if options.lenience is None else options.lenience
    return 1.0 if _is_plain(options, config) and 0.0 < lenience < 1.0 else lenience


def _is_plain(options: SpeculationOptions, config: GatewayConfig) -> bool:
    """Return whether nothing is to be drafted."""
    return options.num_draft_tokens_or(config.num_draft_tokens) == 0


def _uses_prediction(options: SpeculationOptions, config: GatewayConfig) -> bool:
    """Return whether what is predicted is drafted from: not where another drafter is asked for by name."""
    return not _is_plain(options, config) and (
        options.drafter in (None, Drafter.AUTO) or options.drafter.needs_prediction
    )


def wanted_model(served: Sequence[ServedFacts], name: str) -> ServedFacts:
    """Raises InvalidRequest when no model is named and there are several."""
    if name or not served:
        return find_model(served, name)
    if len(served) > 1:
        known = ", ".join(repr(facts.id) for facts in served)
        raise InvalidRequest(f"model is missing, and several are served here: {known}; name one", param="model")
    return served[0]


def find_model(served: Sequence[ServedFacts], name: str) -> ServedFacts:
    """Return the model of this id. Raises ModelNotFound naming what is served."""
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
    """Return each word as a text's start and, where that differs, after a space (as vLLM)."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.strip()
        if not bare:
            raise InvalidRequest(f"bad_words holds {word!r}, which is no word", param="bad_words")
        for text in (bare, f" {bare}"):
            found[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(found)


def check_rows(name: str, ids: Sequence[int], vocab_size: int, tokenizer: Tokenizer) -> None:
    """Raise InvalidRequest naming the first token of a text that the model, of `vocab_size` rows, does not have."""
    for token_id in ids:
        if token_id >= vocab_size:
            raise InvalidRequest(
                f"{name} needs the token {tokenizer.token_name(token_id)!r} ({token_id}), and the model has rows for "
                f"the ids up to {vocab_size - 1} alone; leave it out",
                param=name,
            )


def check_demand(demand: Demand, served: Sequence[ServedFacts]) -> ServedFacts:
    """Check all that needs no tokens, before anything dear is done. Return the model that is asked for."""
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
    """Raises InvalidRequest for more log-probs of prompts than one request is told."""
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
    """Raises InvalidRequest. A drafter that is away, and may be back, is no reason: its rounds are plain meanwhile."""
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
    """Raises InvalidRequest naming what does not go together with a beam search, but for what SamplingParams checks."""
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
    """Raises InvalidRequest for what no output can be."""
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
    """Return the prompt's last `max_ids` ids, or all, and how its answers are made and read. grammar: what was asked of
    them.
    """
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
    """Return how many tokens of the end of a prompt are to be read; None = all."""
    most = demand.most_prompt_tokens
    if most == -1:
        most = facts.context_limit - (0 if facts.decoder_start_ids else demand.max_tokens or 1)
    return None if most is None else max(1, most)


def _check_source(demand: Demand, context_limit: int, num_source: int) -> None:
    """Raises ContextExceeded for a prompt that is longer than an encoder reads."""
    if num_source > context_limit:
        raise ContextExceeded(
            f"{demand.names.prompt} has {num_source} tokens, the encoder reads at most {context_limit}; shorten it",
            param=demand.names.prompt,
        )


def _max_tokens(demand: Demand, facts: ServedFacts, num_prompt: int, may_be_cut: bool) -> int:
    """Return the most output tokens. Raises ContextExceeded with the numbers when prompt and output do not fit.

    may_be_cut: more max_tokens than the context leaves are those that it leaves.
    """
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
