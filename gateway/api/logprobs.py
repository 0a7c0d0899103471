"""Log-probs of tokens in OpenAI's words, and of a prompt's tokens in vLLM's. Pure; plain dicts for orjson."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.generation import GenerationRequest, OutputLogprobs, OutputToken, RoundOutput, TokenKind
from gateway.rounds.detokenizer import Detokenizer
from gateway.tokenizer import Tokenizer

Json = dict[str, Any]

FLOOR_LOGPROB = -9999.0
"""OpenAI's number for a token that cannot be: JSON has no minus infinity."""


@dataclass(frozen=True, slots=True)
class Prompts:
    """What is told of prompts, and of tokens by their ids, where a request asks for it."""

    tokenizer: Tokenizer
    requests: Sequence[GenerationRequest]
    """Of each choice."""
    token_ids: bool
    num_best: int | None
    """Best tokens beside each of the prompt's in vLLM's form; None = nothing is told."""
    num_echoed: int | None
    """The same of an echoed prompt, in OpenAI's form."""

    def of_choice(self, output: RoundOutput) -> Json:
        """Return what a choice says besides."""
        return {"token_ids": [token.id for token in output.tokens]} if self.token_ids else {}

    def told(self, index: int, output: RoundOutput) -> Json:
        """Return what is told of a choice's prompt, with its first output."""
        ids = self.requests[index].asked_ids
        told: Json = {"prompt_token_ids": ids} if self.token_ids else {}
        if self.num_best is not None:
            scores = map(OutputLogprobs.from_proto, output.prompt_logprobs or ())
            told["prompt_logprobs"] = [None, *(self._by_id(*pair) for pair in zip(ids[1:], scores, strict=True))]
        return told

    def _by_id(self, token_id: int, logprobs: OutputLogprobs) -> Json:
        """Return the token itself first, as vLLM does, then the best ones."""
        told = {token_id: (logprobs.logprob, logprobs.rank)}
        for rank, (other, logprob) in enumerate(logprobs.top[: self.num_best], 1):
            told.setdefault(other, (logprob, rank))
        return {
            str(other): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": shown_text(other, self.tokenizer),
            }
            for other, (logprob, rank) in told.items()
        }

    def in_front(self, index: int, output: RoundOutput, logprobs: Json) -> Json:
        """Return the four lists of a choice's first output with those of its prompt in front. The first token has
        no log-prob.
        """
        request = self.requests[index]
        ids = request.asked_ids
        told = map(OutputLogprobs.from_proto, output.prompt_logprobs or ())
        scores = [None, *(replace(each, top=each.top[: self.num_echoed]) for each in told)]
        detokenizer = Detokenizer(
            self.tokenizer, (), self.tokenizer.special_ids if request.shows_special else frozenset()
        )
        tokens = [
            OutputToken(token_id, TokenKind.PLAIN, text, offset, score)
            for token_id, (text, offset), score in zip(ids, detokenizer.push(ids).tokens, scores, strict=True)
        ]
        first: dict[str, list[Any]] = {
            "text_offset": [0],
            "tokens": [label(ids[0], self.tokenizer)],
            "token_logprobs": [None],
            "top_logprobs": [None],
        }
        own = completion_logprobs(tokens[1:], self.tokenizer)
        return {name: [*first[name], *own[name], *logprobs[name]] for name in logprobs}


def completion_logprobs(tokens: Sequence[OutputToken], tokenizer: Tokenizer) -> Json:
    """The four parallel lists of /v1/completions. top_logprobs always has the chosen token, as OpenAI's."""
    pairs = [(token, token.logprobs) for token in tokens if token.logprobs is not None]
    return {
        "tokens": [label(token.id, tokenizer) for token, _ in pairs],
        "token_logprobs": [finite(logprobs.logprob) for _, logprobs in pairs],
        "top_logprobs": [_top_by_label(token.id, logprobs, tokenizer) for token, logprobs in pairs],
        "text_offset": [token.text_offset for token, _ in pairs],
    }


def _top_by_label(token_id: int, logprobs: OutputLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    top: dict[str, float] = {}
    for other, logprob in (*logprobs.top, (token_id, logprobs.logprob)):
        top.setdefault(label(other, tokenizer), finite(logprob))
    return top


def label(token_id: int, tokenizer: Tokenizer) -> str:
    """The token's text, or `bytes:\\xe2\\x82` for a part of a character: labels are keys and must differ."""
    raw = tokenizer.token_bytes(token_id)
    text = shown_text(token_id, tokenizer)
    if "\ufffd" in text and raw is not None:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return text


def shown_text(token_id: int, tokenizer: Tokenizer) -> str:
    """Return the token's text, `<id 291>` for an id that the tokenizer does not have: many models have more of them."""
    if tokenizer.token_name(token_id) is None:
        return f"<id {token_id}>"
    return tokenizer.token_text(token_id)


def chat_logprobs(tokens: Sequence[OutputToken], tokenizer: Tokenizer) -> Json:
    """`content` of a chat choice's logprobs: one entry per token, each with its bytes."""
    content = [
        _chat_entry(token.id, token.logprobs.logprob, tokenizer)
        | {"top_logprobs": [_chat_entry(other, logprob, tokenizer) for other, logprob in token.logprobs.top]}
        for token in tokens
        if token.logprobs is not None
    ]
    return {"content": content, "refusal": None}


def _chat_entry(token_id: int, logprob: float, tokenizer: Tokenizer) -> Json:
    raw = tokenizer.token_bytes(token_id)
    return {
        "token": shown_text(token_id, tokenizer),
        "logprob": finite(logprob),
        "bytes": None if raw is None else list(raw),
    }


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else FLOOR_LOGPROB
