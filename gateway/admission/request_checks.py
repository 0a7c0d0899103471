"""The checks of a request that need no tokenised prompt: which model it names, and whether its fields may be combined.

`Admission` runs them before any expensive work. Every refusal is an InvalidRequest (or a ModelNotFound) that names the
field as the caller's protocol spells it.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.admission.prompts import Chat
from gateway.admission.unchecked_request import Infill, Prompt, UncheckedRequest
from gateway.generation import ServedFacts, SpeculationOptions
from outrider.wire.errors import InvalidRequest, ModelNotFound
from outrider.wire.kinds import DraftLogprobs
from outrider.wire.requests.drafters import Drafter
from outrider.wire.requests.params import CHOICES, LOGPROBS, MAX_BAD_WORDS, Range, check_cache_salt
from outrider.wire.requests.scheduling import MAX_TPOT_MS, PRIORITY

MAX_STOPS = 16
"""Maximal number of stop strings of a request."""
MAX_STOP_CHARS = 1024
"""Maximal length of a stop string or bad word, in characters."""
MAX_MESSAGES = 4096
"""Maximal number of messages of a chat. The template iterates over them in Python."""
MAX_USER_CHARS = 1024
"""Maximal length of `user`, in characters."""
MAX_ECHO_CHARS = 200
"""Maximal number of characters of a caller's text that an error message quotes."""


def requested_model(served: Sequence[ServedFacts], name: str) -> ServedFacts:
    """Return the model with the id `name`; if `name` is empty, the only model that is served.

    Raises InvalidRequest if `name` is empty and several models are served, ModelNotFound for an unknown id.
    """
    if name or not served:
        return find_model(served, name)
    if len(served) > 1:
        known = ", ".join(repr(facts.id) for facts in served)
        raise InvalidRequest(f"model is missing, and several are served here: {known}; name one", param="model")
    return served[0]


def find_model(served: Sequence[ServedFacts], name: str) -> ServedFacts:
    """Return the model with the id `name`, or the model that was started from the path or hub id `name`.

    Raises ModelNotFound, which lists the served models.
    """
    for facts in served:
        if facts.id == name:
            return facts
    for facts in served:
        if facts.is_at(name):
            return facts
    known = ", ".join(repr(facts.id) for facts in served)
    shown = repr(name[:MAX_ECHO_CHARS])
    if len(name) > MAX_ECHO_CHARS:
        shown += "..."
    raise ModelNotFound(f"the model {shown} does not exist; served here: {known}", param="model")


def check_request(unchecked: UncheckedRequest, served: Sequence[ServedFacts]) -> ServedFacts:
    """Check all fields of a request that can be checked without tokens. Return the model that it requests.

    served: models that the gateway serves now. Raises InvalidRequest or ModelNotFound.
    """
    facts = requested_model(served, unchecked.model)
    names = unchecked.names
    CHOICES.check(names.num_choices, unchecked.num_choices)
    if unchecked.max_tokens is not None:
        Range(1, max(facts.context_limit, unchecked.max_tokens)).check(names.max_tokens, unchecked.max_tokens)
    if unchecked.params.num_logprobs is not None:
        LOGPROBS.check(names.num_logprobs, unchecked.params.num_logprobs)
    _check_prompt_logprobs(unchecked, facts)
    _check_truncation(unchecked, facts)
    _check_prompts(unchecked, facts)
    _check_texts(names.stop, "strings", unchecked.stop, MAX_STOPS)
    _check_texts("bad_words", "entries", unchecked.bad_words, MAX_BAD_WORDS)
    if unchecked.cache_salt is not None:
        check_cache_salt(unchecked.cache_salt)
    PRIORITY.check("priority", unchecked.priority)
    if unchecked.max_tpot_ms is not None:
        MAX_TPOT_MS.check("max_tpot_ms", unchecked.max_tpot_ms)
    if unchecked.user is not None and len(unchecked.user) > MAX_USER_CHARS:
        raise InvalidRequest(
            f"user has {len(unchecked.user)} characters, at most {MAX_USER_CHARS} are allowed", param="user"
        )
    _check_speculation(unchecked.speculation, facts.vocab_size)
    _check_drafter(unchecked.speculation.drafter, facts)
    _check_predicted(unchecked)
    _check_tree(unchecked.speculation, facts)
    _check_beams(unchecked, facts)
    return facts


def _check_truncation(unchecked: UncheckedRequest, facts: ServedFacts) -> None:
    name = "truncate_prompt_tokens"
    num_tokens = unchecked.max_prompt_tokens
    if num_tokens is None:
        return
    if num_tokens == 0:
        raise InvalidRequest(f"{name} is 0, which leaves nothing of a prompt; give more, or -1", param=name)
    Range(-1, facts.context_limit).check(name, num_tokens)
    if num_tokens == -1 and (unchecked.max_tokens or 1) >= facts.context_limit:
        raise InvalidRequest(
            f"{name} is -1 and {unchecked.names.max_tokens} is {unchecked.max_tokens}, which leaves nothing of the "
            f"context limit, {facts.context_limit}, to a prompt; give fewer, or set how many of the prompt are used",
            param=name,
        )
    for prompt in unchecked.prompts:
        if isinstance(prompt, Infill):
            why = f"{name} would cut off what marks the prefix of a prompt with a suffix; leave one out"
            raise InvalidRequest(why, param=name)


def _check_prompts(unchecked: UncheckedRequest, facts: ServedFacts) -> None:
    names = unchecked.names
    num_prompts = len(unchecked.prompts)
    if num_prompts == 0:
        raise InvalidRequest(f"{names.prompt} is an empty list", param=names.prompt)
    if unchecked.num_all_choices > facts.max_choices:
        param = names.num_choices
        if num_prompts > 1:
            param = names.prompt
        raise InvalidRequest(
            f"{num_prompts} prompts times {names.num_choices} = {unchecked.num_choices} are "
            f"{unchecked.num_all_choices} answers, this server takes at most {facts.max_choices} at once; split "
            "the request",
            param=param,
        )
    for prompt in unchecked.prompts:
        if isinstance(prompt, Chat) and len(prompt.messages) > MAX_MESSAGES:
            raise InvalidRequest(
                f"{names.prompt} has {len(prompt.messages)} messages, at most {MAX_MESSAGES} are allowed",
                param=names.prompt,
            )


def _check_prompt_logprobs(unchecked: UncheckedRequest, facts: ServedFacts) -> None:
    if unchecked.num_prompt_logprobs is None:
        return
    LOGPROBS.check("prompt_logprobs", unchecked.num_prompt_logprobs)
    if facts.decoder_start_ids:
        raise InvalidRequest(
            "prompt_logprobs, or echo with logprobs, is given, and this model's prompts are read by an encoder, which "
            "returns no log-probs; leave it out",
            param="prompt_logprobs",
        )


def _check_texts(name: str, what: str, texts: tuple[str, ...], max_texts: int) -> None:
    if len(texts) > max_texts:
        raise InvalidRequest(f"{name} has {len(texts)} {what}, at most {max_texts} are allowed", param=name)
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
    # A drafter whose worker is away passes: it may be back, and its rounds have no drafts meanwhile.
    if drafter is None or drafter in facts.drafters:
        return
    raise InvalidRequest(
        f"speculation.drafter is {drafter}, which neither target nor draft of {facts.id} has; offered: "
        f"{', '.join(facts.drafters) or 'none'}{drafter.remedy}",
        param="speculation.drafter",
    )


def _check_predicted(unchecked: UncheckedRequest) -> None:
    drafter = unchecked.speculation.drafter
    if drafter is not None and drafter.needs_prediction and not unchecked.prediction:
        raise InvalidRequest(
            f"speculation.drafter is {drafter} and {unchecked.names.prediction} is empty; give one, or name another "
            "drafter",
            param="speculation.drafter",
        )


def _check_tree(options: SpeculationOptions, facts: ServedFacts) -> None:
    if options.tree is None:
        return
    name = "speculation.tree"
    shown = f"{name} is {options.tree}"
    if options.lenience is not None and options.lenience < 1.0:
        raise InvalidRequest(
            f"{shown} and lenience {options.lenience:g}, which is of chains alone; leave one out", param=name
        )
    if facts.no_trees is not None:
        raise InvalidRequest(f"{shown}, and {facts.no_trees}; give num_draft_tokens instead", param=name)


def _check_beams(unchecked: UncheckedRequest, facts: ServedFacts) -> None:
    beams = unchecked.params.beams
    options = unchecked.speculation
    names = unchecked.names
    if beams is None:
        return
    beams.check(facts.vocab_size, names.num_choices)
    if facts.no_beams is not None:
        raise InvalidRequest(f"use_beam_search is true, and {facts.no_beams}; leave it out", param="use_beam_search")
    output_name = "response_format"
    if unchecked.output is not None:
        output_name = unchecked.output.param
    excluded = {
        "stop": bool(unchecked.stop),
        "bad_words": bool(unchecked.bad_words),
        names.num_logprobs: unchecked.params.num_logprobs is not None,
        "prompt_logprobs": unchecked.num_prompt_logprobs is not None,
        "max_tokens 0": unchecked.is_empty,
        output_name: unchecked.output is not None,
        "tools": any(map(_offers_tools, unchecked.prompts)),
        names.prediction: bool(unchecked.prediction),
        "speculation.tree": options.tree is not None,
        "speculation.lenience": options.lenience is not None and options.lenience < 1.0,
        "speculation.drafter": options.drafter not in (None, Drafter.AUTO, Drafter.MODEL),
        "speculation.explain": options.explain,
    }
    for name, is_given in excluded.items():
        if is_given:
            raise InvalidRequest(f"{name} and use_beam_search do not go together; leave one of them out", param=name)


def _offers_tools(prompt: Prompt) -> bool:
    return isinstance(prompt, Chat) and prompt.tools is not None and len(prompt.tools.tools) > 0
