"""Writes log-probs of output tokens in OpenAI's two forms, and log-probs and ids of prompt tokens in vLLM's form.

The results are plain dicts, for orjson. No I/O. `openai_responses.py` and `layers/responses_writer.py` call it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.generation import GenerationRequest, OutputLogprobs, OutputToken, RoundOutput
from gateway.rounds.detokenizer import Detokenizer
from gateway.tokenizer import Tokenizer
from outrider.wire.kinds import TokenKind

Json = dict[str, Any]

FLOOR_LOGPROB = -9999.0
"""Number that responses have, as OpenAI's do, in place of the log-prob of a token of probability 0: JSON has no minus
infinity."""


@dataclass(frozen=True, slots=True)
class PromptFields:
    """Writes a response's `prompt_token_ids`, `prompt_logprobs`, `token_ids`, and log-probs of an echoed prompt.

    Each field is written only if the client asks for it.
    """

    tokenizer: Tokenizer
    requests: Sequence[GenerationRequest]
    """Request of each choice, by the choice's index."""
    token_ids: bool
    """Whether the client asks for `token_ids` and `prompt_token_ids`."""
    num_best: int | None
    """Number of most likely tokens that `prompt_logprobs` has for each prompt token; None: the response has no
    `prompt_logprobs`."""
    num_echoed: int | None
    """Number of most likely tokens in a completion's `logprobs` for each token of an echoed prompt. None: the prompt
    has no entries there."""

    def choice_fields(self, output: RoundOutput) -> Json:
        """Return the field `token_ids` for the output of a choice, or no field if the client does not ask for it."""
        if not self.token_ids:
            return {}
        return {"token_ids": [token.id for token in output.tokens]}

    def prompt_fields(self, index: int, output: RoundOutput) -> Json:
        """Return the fields `prompt_token_ids` and `prompt_logprobs` for the prompt of the choice at `index`.

        A field that the client does not ask for is left out. output: first output of the choice, which has the prompt's
        log-probs.
        """
        ids = self.requests[index].caller_prompt_ids
        fields: Json = {}
        if self.token_ids:
            fields["prompt_token_ids"] = ids
        if self.num_best is not None:
            scores = map(OutputLogprobs.from_proto, output.prompt_logprobs or ())
            by_id = [self._by_id(token_id, score) for token_id, score in zip(ids[1:], scores, strict=True)]
            fields["prompt_logprobs"] = [None, *by_id]  # the first token has no log-prob
        return fields

    def _by_id(self, token_id: int, score: OutputLogprobs) -> Json:
        # The token itself comes first, as in vLLM, and need not be among the most likely ones.
        ranked = {token_id: (score.logprob, score.rank)}
        for rank, (other_id, logprob) in enumerate(score.top[: self.num_best], 1):
            ranked.setdefault(other_id, (logprob, rank))
        entries = {}
        for other_id, (logprob, other_rank) in ranked.items():
            text = shown_text(other_id, self.tokenizer)
            entries[str(other_id)] = {"logprob": finite(logprob), "rank": other_rank, "decoded_token": text}
        return entries

    def with_prompt(self, index: int, output: RoundOutput, logprobs: Json) -> Json:
        """Return the field `logprobs` of a completion with the entries of its echoed prompt put before the others.

        index: index of the choice. output: first output of the choice, which has the prompt's log-probs. logprobs: the
        field for the output's tokens, four lists. The log-prob of the prompt's first token is None.
        """
        request = self.requests[index]
        ids = request.caller_prompt_ids
        first: dict[str, list[Any]] = {
            "text_offset": [0],
            "tokens": [label(ids[0], self.tokenizer)],
            "token_logprobs": [None],
            "top_logprobs": [None],
        }
        others = completion_logprobs(self._prompt_tokens(request, output)[1:], self.tokenizer)
        return {name: [*first[name], *others[name], *logprobs[name]] for name in logprobs}

    def _prompt_tokens(self, request: GenerationRequest, output: RoundOutput) -> list[OutputToken]:
        shown_ids = frozenset[int]()
        if request.shows_special:
            shown_ids = self.tokenizer.special_ids
        texts = Detokenizer(self.tokenizer, (), shown_ids).push(request.caller_prompt_ids).tokens
        scores: list[OutputLogprobs | None] = [None]
        for message in output.prompt_logprobs or ():
            score = OutputLogprobs.from_proto(message)
            scores.append(replace(score, top=score.top[: self.num_echoed]))
        return [
            OutputToken(token_id, TokenKind.PLAIN, text, offset, score)
            for token_id, (text, offset), score in zip(request.caller_prompt_ids, texts, scores, strict=True)
        ]


def completion_logprobs(tokens: Sequence[OutputToken], tokenizer: Tokenizer) -> Json:
    """Return the `logprobs` of a choice of /v1/completions: four lists with an entry for each token that has log-probs.

    As in OpenAI's API, an entry of `top_logprobs` always includes the token itself.
    """
    labels: list[str] = []
    token_logprobs: list[float] = []
    top_logprobs: list[dict[str, float]] = []
    offsets: list[int] = []
    for token in tokens:
        if token.logprobs is not None:
            labels.append(label(token.id, tokenizer))
            token_logprobs.append(finite(token.logprobs.logprob))
            top_logprobs.append(_top_by_label(token.id, token.logprobs, tokenizer))
            offsets.append(token.text_offset)
    return {"tokens": labels, "token_logprobs": token_logprobs, "top_logprobs": top_logprobs, "text_offset": offsets}


def _top_by_label(token_id: int, logprobs: OutputLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    top: dict[str, float] = {}
    for other_id, logprob in (*logprobs.top, (token_id, logprobs.logprob)):
        top.setdefault(label(other_id, tokenizer), finite(logprob))
    return top


def label(token_id: int, tokenizer: Tokenizer) -> str:
    """Return a token's text; for an incomplete character its bytes, as `bytes:\\xe2\\x82`.

    Labels are keys of `top_logprobs`, so different tokens must have different labels.
    """
    raw = tokenizer.token_bytes(token_id)
    text = shown_text(token_id, tokenizer)
    if "\ufffd" in text and raw is not None:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return text


def shown_text(token_id: int, tokenizer: Tokenizer) -> str:
    """Return a token's text, or `<id 291>` for an id that the tokenizer does not have.

    Many models can produce more ids than their tokenizer has.
    """
    if tokenizer.token_name(token_id) is None:
        return f"<id {token_id}>"
    return tokenizer.token_text(token_id)


def chat_logprobs(tokens: Sequence[OutputToken], tokenizer: Tokenizer) -> Json:
    """Return the `logprobs` of a choice of a chat, with an entry for each token that has log-probs."""
    content = []
    for token in tokens:
        if token.logprobs is not None:
            entry = _chat_entry(token.id, token.logprobs.logprob, tokenizer)
            entry["top_logprobs"] = [_chat_entry(top_id, logprob, tokenizer) for top_id, logprob in token.logprobs.top]
            content.append(entry)
    return {"content": content, "refusal": None}


def _chat_entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> Json:
    entry: Json = {"token": shown_text(token_id, tokenizer), "logprob": finite(logprob), "bytes": None}
    raw = tokenizer.token_bytes(token_id)
    if raw is not None:
        entry["bytes"] = list(raw)
    return entry


def finite(logprob: float) -> float:
    """Return `logprob`, or FLOOR_LOGPROB if it is not a finite number, which JSON cannot express."""
    if math.isfinite(logprob):
        return logprob
    return FLOOR_LOGPROB
