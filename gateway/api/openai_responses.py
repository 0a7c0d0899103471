"""Answers in OpenAI's words: whole ones and stream chunks of both endpoints. Pure; plain dicts for orjson."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.generation import AnswerUsage, FinishReason, OutputLogprobs, OutputToken, RoundOutput
from gateway.tokenizer import Tokenizer

Json = dict[str, Any]

FLOOR_LOGPROB = -9999.0
"""OpenAI's number for a token that cannot be: JSON has no minus infinity."""


@dataclass(slots=True)
class Answer:
    """One choice as it grows."""

    texts: list[str] = field(default_factory=list)
    tokens: list[OutputToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    usage: AnswerUsage | None = None

    def add(self, output: RoundOutput) -> None:
        self.texts.append(output.text_delta)
        self.tokens.extend(output.tokens)
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        self.usage = output.usage

    @property
    def text(self) -> str:
        return "".join(self.texts)


class Form(Protocol):
    """How an endpoint spells its choices."""

    @property
    def object(self) -> str: ...

    @property
    def chunk_object(self) -> str: ...

    def choice(self, index: int, answer: Answer) -> Json: ...

    def chunk(self, index: int, output: RoundOutput, first: bool) -> Json: ...


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """`echoes`: text in front of each answer, one per choice; empty when no echo was asked for."""

    tokenizer: Tokenizer
    logprobs: bool
    echoes: Sequence[str] = ()
    object: str = "text_completion"
    chunk_object: str = "text_completion"

    def choice(self, index: int, answer: Answer) -> Json:
        return self._entry(index, self._echo(index) + answer.text, answer.tokens, answer)

    def chunk(self, index: int, output: RoundOutput, first: bool) -> Json:
        text = self._echo(index) + output.text_delta if first else output.text_delta
        return self._entry(index, text, output.tokens, output)

    def _echo(self, index: int) -> str:
        return self.echoes[index] if self.echoes else ""

    def _entry(self, index: int, text: str, tokens: Sequence[OutputToken], end: Answer | RoundOutput) -> Json:
        logprobs = completion_logprobs(tokens, self.tokenizer) if self.logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, **_ending(end)}


@dataclass(frozen=True, slots=True)
class ChatForm:
    tokenizer: Tokenizer
    logprobs: bool
    object: str = "chat.completion"
    chunk_object: str = "chat.completion.chunk"

    def choice(self, index: int, answer: Answer) -> Json:
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(answer.tokens), **_ending(answer)}

    def chunk(self, index: int, output: RoundOutput, first: bool) -> Json:
        delta = {"role": "assistant", "content": output.text_delta} if first else {"content": output.text_delta}
        return {"index": index, "delta": delta, "logprobs": self._logprobs(output.tokens), **_ending(output)}

    def _logprobs(self, tokens: Sequence[OutputToken]) -> Json | None:
        return chat_logprobs(tokens, self.tokenizer) if self.logprobs else None


def _ending(end: Answer | RoundOutput) -> Json:
    reason = None if end.finish_reason is None else end.finish_reason.value
    return {"finish_reason": reason, "stop_reason": end.stop_reason}


def completion_logprobs(tokens: Sequence[OutputToken], tokenizer: Tokenizer) -> Json:
    """The four parallel lists of /v1/completions. top_logprobs always has the chosen token, as OpenAI's."""
    pairs = [(token, token.logprobs) for token in tokens if token.logprobs is not None]
    return {
        "tokens": [_label(token.id, tokenizer) for token, _ in pairs],
        "token_logprobs": [_finite(logprobs.logprob) for _, logprobs in pairs],
        "top_logprobs": [_top_by_label(token.id, logprobs, tokenizer) for token, logprobs in pairs],
        "text_offset": [token.text_offset for token, _ in pairs],
    }


def _top_by_label(token_id: int, logprobs: OutputLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    top: dict[str, float] = {}
    for other, logprob in (*logprobs.top, (token_id, logprobs.logprob)):
        top.setdefault(_label(other, tokenizer), _finite(logprob))
    return top


def _label(token_id: int, tokenizer: Tokenizer) -> str:
    """The token's text, or `bytes:\\xe2\\x82` for a part of a character: labels are keys and must differ."""
    text = tokenizer.token_text(token_id)
    raw = tokenizer.token_bytes(token_id)
    if "\ufffd" in text and raw is not None:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return text


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
        "token": tokenizer.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": None if raw is None else list(raw),
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else FLOOR_LOGPROB


def usage_of(prompts: Sequence[Sequence[AnswerUsage]]) -> Json:
    """Sums over the answers of each prompt; a prompt counts once, however many answers it got.

    Of a prompt's tokens those are cached that no answer had to compute.
    """
    usages = [usage for answers in prompts for usage in answers]
    num_prompt_tokens = sum(answers[0].num_prompt_tokens for answers in prompts)
    cached = sum(min(usage.num_cached_prompt_tokens for usage in answers) for answers in prompts)
    completion = sum(usage.num_completion_tokens for usage in usages)
    drafted = sum(usage.num_draft_tokens for usage in usages)
    accepted = sum(usage.num_accepted_tokens for usage in usages)
    rounds = sum(usage.num_rounds for usage in usages)
    seeds = {usage.seed for usage in usages}
    details = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": drafted - accepted}
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": num_prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached, "audio_tokens": 0},
        "completion_tokens_details": {**details, "reasoning_tokens": 0, "audio_tokens": 0},
        "speculation": {
            "num_rounds": rounds,
            "num_plain_steps": sum(usage.num_plain_steps for usage in usages),
            "num_draft_tokens": drafted,
            "num_accepted_tokens": accepted,
            "acceptance_rate": accepted / drafted if drafted else None,
            "mean_accepted_length": 1 + accepted / rounds if rounds else None,
            "seed": seeds.pop() if len(seeds) == 1 else None,
            "seeds": [answers[0].seed for answers in prompts],
            "lenience": usages[0].lenience,
        },
    }
