"""Turns a checked `UncheckedRequest` into `GenerationRequest`s: renders and tokenises its prompts, and fills in the
values that depend on the model's limits.

`Admission` calls it once the request has a place in the queue. Every refusal is an InvalidRequest that names the field
as the caller's protocol spells it.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence

from gateway.admission.identities import caller_of, corpus_of, salt_of
from gateway.admission.prepared_prompts import CallerGrammars, PreparedPrompt, prepare_prompt
from gateway.admission.prompts import PromptReader
from gateway.admission.unchecked_request import UncheckedRequest
from gateway.generation import GenerationRequest, ServedFacts, SpeculationOptions
from gateway.grammar_checker import GrammarChecker
from gateway.tokenizer import Tokenizer
from outrider.wire.errors import ContextExceeded, InvalidRequest
from outrider.wire.kinds import AcceptanceRule
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import check_token_ids
from outrider.wire.requests.sampling_defaults import MAX_TOKENS, apply_defaults
from outrider.wire.requests.scheduling import Scheduling
from outrider.wire.requests.speculation import check_what_is_drafted
from outrider.wire.settings.config import GatewayConfig

MAX_PROMPT_LOGPROBS = 1 << 20
"""Maximal number of prompt log-probs that one request returns. Measured with /v1/completions and prompt_logprobs 20: a
prompt of 32k tokens has 0.7 million, which take 5 MB in the target's message, and 300 MB of memory and 0.9 s of time in
the gateway."""


async def build_requests(
    unchecked: UncheckedRequest,
    facts: ServedFacts,
    reader: PromptReader,
    config: GatewayConfig,
    checker: GrammarChecker,
    key_name: str | None = None,
    weight: float = 1.0,
) -> tuple[GenerationRequest, ...]:
    """Return one request for each choice. A choice has the index `prompt * num_choices + choice` in the result.

    Chats are rendered and grammars are checked in other processes. Long texts are tokenised on threads.

    unchecked: request that has passed `check_request`. facts: the model that it names. reader: renders and
    tokenises its texts. checker: checks its grammars. key_name, weight: name and weight of the caller's API key.

    Raises InvalidRequest, and ContextExceeded for a prompt that does not fit the context.

        # 2 prompts with n = 3: the last choice of the second prompt has index 1 * 3 + 2 = 5
    """
    options = unchecked.speculation
    check_what_is_drafted(
        options.num_draft_tokens, options.tree, options.drafter, config.max_draft_tokens, "speculation."
    )
    num_chars = 2 * sum(map(len, unchecked.bad_words))
    words = await reader.work(num_chars, bad_word_ids, unchecked.bad_words, reader.tokenizer)
    for word in words:
        check_ids("bad_words", word, facts.vocab_size, reader.tokenizer)
    rule = _acceptance(unchecked.speculation, config)
    lenience = _lenience(unchecked.speculation, config)
    grammars = CallerGrammars(checker, caller_of(key_name, None))
    grammar = await grammars.output(unchecked.output)
    params = unchecked.params
    if unchecked.named is not None:
        params = apply_defaults(params, unchecked.named, facts.sampling_defaults)
    base = dataclasses.replace(
        params, bad_words=(*params.bad_words, *words), acceptance=rule, lenience=lenience, grammar=grammar
    )
    # Once, before prompts cost anything; only what depends on a prompt's length is checked for each prompt again.
    max_tokens = facts.context_limit
    if unchecked.max_tokens is not None:
        max_tokens = min(unchecked.max_tokens, facts.context_limit)
    elif base.beams is not None:
        max_tokens = 1
    dataclasses.replace(base, max_tokens=max_tokens).check(facts.vocab_size)
    prediction_ids: tuple[int, ...] = ()
    if unchecked.prediction and _uses_prediction(unchecked.speculation, config):
        prediction_ids = await _prediction_ids(unchecked, facts, reader)
    corpus_id = corpus_of(
        config.lookup_scope,
        key_name,
        unchecked.user,
        unchecked.cache_salt,
        may_read=unchecked.speculation.explain or lenience < 1.0,
    )
    template = GenerationRequest(
        request_id=unchecked.request_id,
        model=facts.id,
        prompt_ids=(),
        params=base,
        stop=unchecked.stop,
        speculation=unchecked.speculation,
        prediction_ids=prediction_ids,
        cache_salt=salt_of(config.prefix_cache_scope, key_name, unchecked.user, unchecked.cache_salt),
        corpus_id=corpus_id,
        scheduling=Scheduling(
            caller_of(key_name, unchecked.cache_salt), weight, unchecked.priority, unchecked.max_tpot_ms
        ),
        key_name=key_name,
        is_empty=unchecked.is_empty,
        keeps_stop=unchecked.keeps_stop,
        stops_in_reasoning=unchecked.stops_in_reasoning,
        shows_special=unchecked.shows_special,
    )
    may_be_cut = config.max_tokens_beyond_context == "clamp"
    requests: list[GenerationRequest] = []
    for prompt in unchecked.prompts:
        prepared = await prepare_prompt(
            prompt,
            reader,
            unchecked.names.prompt,
            grammars,
            base.grammar,
            unchecked.adds_special,
            _max_prompt_tokens(unchecked, facts),
        )
        if not isinstance(prompt, tuple):
            check_ids(unchecked.names.prompt, prepared.ids, facts.vocab_size, reader.tokenizer)
        request = _request_of(template, unchecked, facts, prepared, may_be_cut)
        requests += _choices(_with_answer_stops(request, reader.tokenizer), unchecked)
    return tuple(requests)


async def prompt_ids(
    unchecked: UncheckedRequest, reader: PromptReader, checker: GrammarChecker, key_name: str | None
) -> tuple[int, ...]:
    """Return the token ids of the chat that is the request's only prompt, without generating an output.

    reader: renders and tokenises the chat. checker: checks the grammars of its output, for the API key
    `key_name`. Raises InvalidRequest, also for an output format that cannot be enforced, or ContextExceeded.
    """
    (chat,) = unchecked.prompts
    grammars = CallerGrammars(checker, caller_of(key_name, None))
    grammar = await grammars.output(unchecked.output)
    return (await prepare_prompt(chat, reader, unchecked.names.prompt, grammars, grammar)).ids


def _acceptance(options: SpeculationOptions, config: GatewayConfig) -> AcceptanceRule:
    if options.acceptance is not None:
        return options.acceptance
    if options.lenience is not None and options.lenience < 1.0:
        return AcceptanceRule.REJECTION  # the one that has lenience
    return AcceptanceRule[config.acceptance.upper()]


def _lenience(options: SpeculationOptions, config: GatewayConfig) -> float:
    if options.lenience is None:
        return 1.0
    if _is_plain(options, config) and 0.0 < options.lenience < 1.0:
        return 1.0
    return options.lenience  # an invalid one is refused with the other sampling parameters


def _is_plain(options: SpeculationOptions, config: GatewayConfig) -> bool:
    return options.num_draft_tokens_or(config.num_draft_tokens) == 0


def _uses_prediction(options: SpeculationOptions, config: GatewayConfig) -> bool:
    if _is_plain(options, config):
        return False
    return options.drafter is None or options.drafter is Drafter.AUTO or options.drafter.needs_prediction


def bad_word_ids(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token id sequences that bad words become: without and with a space before them, as in vLLM.

    Equal sequences are returned once. Raises InvalidRequest for a word of white space alone.
    """
    sequences: dict[tuple[int, ...], None] = {}  # a set that keeps the order
    for word in words:
        bare = word.strip()
        if not bare:
            raise InvalidRequest(f"bad_words holds {word!r}, which is no word", param="bad_words")
        for text in (bare, f" {bare}"):
            sequences[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(sequences)


def check_ids(name: str, ids: Sequence[int], vocab_size: int, tokenizer: Tokenizer) -> None:
    """Raise InvalidRequest, which names the token, if one of `ids` is `vocab_size` or more.

    name: name of the field with the ids. vocab_size: number of the model's logits; the tokenizer may have more ids.
    """
    for token_id in ids:
        if token_id >= vocab_size:
            raise InvalidRequest(
                f"{name} needs the token {tokenizer.token_name(token_id)!r} ({token_id}), and the model has rows for "
                f"the ids up to {vocab_size - 1} alone; leave it out",
                param=name,
            )


def _check_num_scores(unchecked: UncheckedRequest, num_prompt: int) -> None:
    if unchecked.num_prompt_logprobs is None:
        return
    num_best = unchecked.num_prompt_logprobs
    num_answers = unchecked.num_all_choices
    num_scores = num_prompt * (num_best + 1) * num_answers
    if num_scores > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs, or logprobs with echo, is {num_best}, which of a prompt of {num_prompt} tokens and "
            f"{num_answers} answers makes {num_scores} log-probs, at most {MAX_PROMPT_LOGPROBS} are returned; set "
            "fewer, or split the request",
            param="prompt_logprobs",
        )


async def _prediction_ids(unchecked: UncheckedRequest, facts: ServedFacts, reader: PromptReader) -> tuple[int, ...]:
    name = unchecked.names.prediction
    tokenizer = reader.tokenizer
    ids = await reader.first_ids(unchecked.prediction, facts.context_limit)  # no output is longer
    for token_id in sorted(tokenizer.special_ids.intersection(ids)):
        text = tokenizer.token_text(token_id)
        if text in unchecked.prediction:  # else the tokenizer put it there, such as for an unknown word
            raise InvalidRequest(f"{name} holds {text!r}, a special token, which is no text; leave it out", param=name)
    check_ids(name, ids, facts.vocab_size, tokenizer)
    return ids


def _request_of(
    template: GenerationRequest,
    unchecked: UncheckedRequest,
    facts: ServedFacts,
    prepared: PreparedPrompt,
    may_be_cut: bool,
) -> GenerationRequest:
    # `template` holds all that the prompts of the request share.
    ids = prepared.ids
    if prepared.grammar and unchecked.params.ignore_eos:
        what = "tools"
        if unchecked.output is not None:
            what = unchecked.output.param
        elif prepared.reading is not None and prepared.reading.bounds_reasoning:
            what = "thinking_token_budget"
        raise InvalidRequest(
            f"ignore_eos is true and {what} sets the form of the output, which then could not end where it is "
            "complete; leave one out",
            param="ignore_eos",
        )
    source_ids: tuple[int, ...] = ()
    if facts.decoder_start_ids:
        _check_source(unchecked, facts.context_limit, len(ids))
        source_ids = ids
        ids = facts.decoder_start_ids
    max_tokens = _max_tokens(unchecked, facts, len(ids), may_be_cut)
    check_token_ids(unchecked.names.prompt, source_ids or ids, facts.vocab_size)
    _check_num_scores(unchecked, len(ids))
    seed = unchecked.seed
    if seed is None:
        seed = secrets.randbits(53)  # it is reported, and JSON numbers lose more bits in many clients
    params = dataclasses.replace(template.params, max_tokens=max_tokens, seed=seed, grammar=prepared.grammar)
    if params.min_tokens > max_tokens or params.beams is not None:
        params.check(facts.vocab_size)
    return dataclasses.replace(template, prompt_ids=ids, source_ids=source_ids, params=params, reading=prepared.reading)


def _with_answer_stops(request: GenerationRequest, tokenizer: Tokenizer) -> GenerationRequest:
    """Stop ids end an output only after its reasoning, special tokens aside, unless the request has them end both.

    # stop_token_ids (2, 13) where 2 is <eos>: `params` keeps 2, and 13 moves to `answer_stop_ids`
    """
    params = request.params
    may_reason = request.reading is not None and request.reading.marks is not None
    if not may_reason or request.stops_in_reasoning or params.beams is not None:
        return request
    special_ids = tokenizer.special_ids
    at_once = tuple(stop_id for stop_id in params.stop_token_ids if stop_id in special_ids)
    return dataclasses.replace(
        request,
        params=dataclasses.replace(params, stop_token_ids=at_once),
        answer_stop_ids=frozenset(params.stop_token_ids) - special_ids,
    )


def _choices(request: GenerationRequest, unchecked: UncheckedRequest) -> list[GenerationRequest]:
    choices: list[GenerationRequest] = []
    for choice in range(unchecked.num_choices):
        params = dataclasses.replace(request.params, choice=choice)
        num_prompt_logprobs: int | None = None
        if choice == 0:  # responses show the first one's with all choices
            num_prompt_logprobs = unchecked.num_prompt_logprobs
        choices.append(dataclasses.replace(request, params=params, num_prompt_logprobs=num_prompt_logprobs))
    return choices


def _max_prompt_tokens(unchecked: UncheckedRequest, facts: ServedFacts) -> int | None:
    num_tokens = unchecked.max_prompt_tokens
    if num_tokens is None:
        return None
    if num_tokens == -1:
        num_tokens = facts.context_limit
        if not facts.decoder_start_ids:  # prompt and output share the context
            num_tokens -= unchecked.max_tokens or 1
    return max(1, num_tokens)


def _check_source(unchecked: UncheckedRequest, context_limit: int, num_source: int) -> None:
    if num_source > context_limit:
        raise ContextExceeded(
            f"{unchecked.names.prompt} has {num_source} tokens, the encoder reads at most {context_limit}; shorten it",
            param=unchecked.names.prompt,
        )


def _max_tokens(unchecked: UncheckedRequest, facts: ServedFacts, num_prompt: int, may_be_cut: bool) -> int:
    """may_be_cut: whether a larger max_tokens is lowered to the tokens that the context leaves, rather than refused.

    # context limit 100, prompt of 90 tokens, max_tokens 20: 10 if `may_be_cut`, else ContextExceeded
    """
    context_limit = facts.context_limit
    name = unchecked.names.prompt
    remaining = context_limit - num_prompt
    if remaining < 1:
        raise ContextExceeded(
            f"{name} has {num_prompt} tokens, the context limit is {context_limit} for prompt and output together; "
            "shorten it",
            param=name,
        )
    if unchecked.params.min_tokens > remaining:
        raise InvalidRequest(
            f"min_tokens is {unchecked.params.min_tokens}, and {name} has {num_prompt} tokens, of the context limit "
            f"{context_limit} at most {remaining} can follow; lower it, or shorten {name}",
            param="min_tokens",
        )
    if unchecked.max_tokens is None:
        stated: float = remaining
        if unchecked.named is not None:
            stated = facts.sampling_defaults.get(MAX_TOKENS, remaining)
        return max(min(remaining, int(stated)), unchecked.params.min_tokens)
    if unchecked.max_tokens > remaining:
        if may_be_cut:
            return remaining
        raise ContextExceeded(
            f"{name} has {num_prompt} tokens and {unchecked.names.max_tokens} is {unchecked.max_tokens}, together "
            f"{num_prompt + unchecked.max_tokens}; the context limit is {context_limit}, so at most {remaining} can "
            "follow",
            param=unchecked.names.max_tokens,
        )
    return unchecked.max_tokens
