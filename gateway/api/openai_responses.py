"""Answers in OpenAI's words: whole ones and stream chunks of both endpoints. Pure; plain dicts for orjson."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.generation import AnswerUsage, OutputLogprobs, OutputToken, RoundOutput
from gateway.tokenizer import Tokenizer

Json = dict[str, Any]

FLOOR_LOGPROB = -9999.0
"""OpenAI's number for a token that cannot be: JSON has no minus infinity."""


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """Spells choices as /v1/completions does. `echoes`: text in front of each; empty when no echo was asked for."""

    tokenizer: Tokenizer
    logprobs: bool
    echoes: Sequence[str]
    object = chunk_object = "text_completion"

    def choice(self, index: int, output: RoundOutput) -> Json:
        return self.chunk(index, output, first=True)

    def chunk(self, index: int, output: RoundOutput, first: bool) -> Json:
        text = self.echoes[index] + output.text_delta if first and self.echoes else output.text_delta
        logprobs = completion_logprobs(output.tokens, self.tokenizer) if self.logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, **_ending(output)}


@dataclass(frozen=True, slots=True)
class ChatForm:
    """Spells choices as /v1/chat/completions does."""

    tokenizer: Tokenizer
    logprobs: bool
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def choice(self, index: int, output: RoundOutput) -> Json:
        message = {"role": "assistant", "content": output.text_delta, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(output), **_ending(output)}

    def chunk(self, index: int, output: RoundOutput, first: bool) -> Json:
        delta = {"role": "assistant", "content": output.text_delta} if first else {"content": output.text_delta}
        return {"index": index, "delta": delta, "logprobs": self._logprobs(output), **_ending(output)}

    def _logprobs(self, output: RoundOutput) -> Json | None:
        return chat_logprobs(output.tokens, self.tokenizer) if self.logprobs else None


def joined(outputs: Sequence[RoundOutput]) -> RoundOutput:
    """Return all rounds of an answer as one."""
    tokens = tuple(token for output in outputs for token in output.tokens)
    return replace(outputs[-1], tokens=tokens, text_delta="".join(output.text_delta for output in outputs))


def _ending(output: RoundOutput) -> Json:
    reason = None if output.finish_reason is None else output.finish_reason.value
    return {"finish_reason": reason, "stop_reason": output.stop_reason}


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


def usage_of(usages: Sequence[AnswerUsage], num_choices: int) -> Json:
    """Sums over the answers of each prompt; a prompt counts once, however many answers it got.

    Of a prompt's tokens those are cached that no answer had to compute. usages: of num_choices answers to each prompt.
    """
    prompts = [usages[first : first + num_choices] for first in range(0, len(usages), num_choices)]
    num_prompt_tokens = sum(answers[0].num_prompt_tokens for answers in prompts)
    cached = sum(min(usage.num_cached_prompt_tokens for usage in answers) for answers in prompts)
    completion = sum(usage.num_completion_tokens for usage in usages)
    drafted = sum(usage.num_draft_tokens for usage in usages)
    accepted = sum(usage.num_accepted_tokens for usage in usages)
    rounds = sum(usage.num_rounds for usage in usages)
    seeds = {usage.seed for usage in usages}
    details = {
        "accepted_prediction_tokens": sum(usage.num_accepted_prediction_tokens for usage in usages),
        "rejected_prediction_tokens": sum(usage.num_rejected_prediction_tokens for usage in usages),
    }
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
