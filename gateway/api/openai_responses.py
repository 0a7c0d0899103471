"""Answers in OpenAI's words: whole ones and stream chunks of both endpoints. Pure; plain dicts for orjson."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.api.logprobs import Prompts, chat_logprobs, completion_logprobs
from gateway.api.speculation_answers import speculation_of
from gateway.generation import AnswerUsage, FinishReason, RoundOutput, most_common_reason
from gateway.tokenizer import Tokenizer
from gateway.tools.reader import Arguments, CallBegun, Content, Part, Reader, Reasoning
from gateway.tools.reading import Reading

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """Spells choices as /v1/completions does. `echoes`: text in front of each; empty when no echo was asked for."""

    tokenizer: Tokenizer
    logprobs: bool
    echoes: Sequence[str]
    token_kinds: bool = False
    """Each choice says what its tokens are, and what is explained of its round."""
    prompts: Prompts | None = None
    """What is told of the prompts besides."""
    num_reasoning_tokens = 0
    object = chunk_object = "text_completion"

    def choice(self, index: int, output: RoundOutput) -> Json:
        return self._spelt(index, output, first=True)

    def chunk(self, index: int, output: RoundOutput, first: bool) -> Json | None:
        """Return None where there is nothing to say."""
        told = self.logprobs or self.token_kinds or (self.prompts is not None and self.prompts.token_ids)
        if first or output.text_delta or output.finish_reason or told:
            return self._spelt(index, output, first)
        return None

    def _spelt(self, index: int, output: RoundOutput, first: bool) -> Json:
        text = self.echoes[index] + output.text_delta if first and self.echoes else output.text_delta
        logprobs = completion_logprobs(output.tokens, self.tokenizer) if self.logprobs else None
        more: Json = {"speculation": speculation_of(output, self.tokenizer)} if self.token_kinds else {}
        if self.prompts is not None:
            if logprobs is not None and self.echoes:
                logprobs["text_offset"] = [len(self.echoes[index]) + each for each in logprobs["text_offset"]]
                logprobs = self.prompts.in_front(index, output, logprobs) if first else logprobs
            more |= self.prompts.of_choice(output) | (self.prompts.told(index, output) if first else {})
        return {"index": index, "text": text, "logprobs": logprobs, **_ending(output), **more}

    def beside(self, index: int, output: RoundOutput) -> Json:
        """Return what stands beside the choices."""
        return {}


@dataclass(frozen=True, slots=True)
class ChatForm:
    """Spells choices as /v1/chat/completions does. Give it each choice's outputs once, in order."""

    tokenizer: Tokenizer
    logprobs: bool
    readings: Sequence[Reading | None]
    """Of each choice."""
    token_kinds: bool = False
    """As in CompletionForm, and so the next."""
    prompts: Prompts | None = None
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    _texts: dict[int, ReadText] = field(default_factory=dict)

    @property
    def num_reasoning_tokens(self) -> int:
        return sum(text.num_reasoning_tokens for text in self._texts.values())

    def choice(self, index: int, output: RoundOutput) -> Json:
        message = {"role": "assistant", "content": output.text_delta, "refusal": None}
        has_calls = False
        if (text := self._text(index)) is not None:
            message |= message_of(text.read(output), text.call_id)
            has_calls = text.has_calls
        ending = _ending(output, has_calls) | self._of_choice(output)
        return {"index": index, "message": message, "logprobs": self._logprobs(output), **ending}

    def beside(self, index: int, output: RoundOutput) -> Json:
        """Return what stands beside the choices: of the prompt, which all answers share, with the first of them."""
        return {} if self.prompts is None or index else self.prompts.told(index, output)

    def _of_choice(self, output: RoundOutput) -> Json:
        told: Json = {"speculation": speculation_of(output, self.tokenizer)} if self.token_kinds else {}
        return told if self.prompts is None else told | self.prompts.of_choice(output)

    def chunk(self, index: int, output: RoundOutput, first: bool) -> Json | None:
        """Return None where there is nothing to say."""
        text = self._text(index)
        delta = {"content": output.text_delta} if text is None else delta_of(text.read(output), text.call_id)
        told = self.logprobs or self.token_kinds or (self.prompts is not None and self.prompts.token_ids)
        if not (first or any(delta.values()) or output.finish_reason or told):
            return None
        if first:
            delta = {"role": "assistant", "content": "", **delta}
        ending = _ending(output, text is not None and text.has_calls) | self._of_choice(output)
        return {"index": index, "delta": delta, "logprobs": self._logprobs(output), **ending}

    def _text(self, index: int) -> ReadText | None:
        reading = self.readings[index]
        if reading is not None and index not in self._texts:
            self._texts[index] = ReadText(reading)
        return self._texts.get(index)

    def _logprobs(self, output: RoundOutput) -> Json | None:
        return chat_logprobs(output.tokens, self.tokenizer) if self.logprobs else None


class ReadText:
    """One answer's text, read for calls and reasoning."""

    def __init__(self, reading: Reading) -> None:
        self._reader: Reader = reading.reader()
        self._has_short_ids = reading.family is not None and reading.family.short_ids
        self._offsets: list[int] = []
        """Characters before each token, until the reasoning is over."""
        self.num_reasoning_tokens = 0

    @property
    def has_calls(self) -> bool:
        return self._reader.num_calls > 0

    def read(self, output: RoundOutput) -> list[Part]:
        was_reasoning = self._reader.reasoning_end is None
        parts = self._reader.push(output.text_delta)
        if output.finish_reason is not None:
            is_cut = output.finish_reason is FinishReason.LENGTH or output.stop_reason is not None
            parts += self._reader.finish(is_cut)
        if was_reasoning:
            self._offsets += [token.text_offset for token in output.tokens]
            end = self._reader.reasoning_end
            self.num_reasoning_tokens = len(self._offsets) if end is None else sum(at < end for at in self._offsets)
        return parts

    def call_id(self) -> str:
        if self._has_short_ids:
            return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


def message_of(parts: Iterable[Part], call_id: Callable[[], str]) -> Json:
    """Return what a whole answer's parts are in its message."""
    texts: dict[type, list[str]] = {Content: [], Reasoning: []}
    calls: dict[int, tuple[str, list[str]]] = {}
    for part in parts:
        if isinstance(part, Content | Reasoning):
            texts[type(part)].append(part.text)
        elif isinstance(part, CallBegun):
            calls[part.index] = (part.name, [])
        elif isinstance(part, Arguments):
            calls[part.index][1].append(part.text)
        else:
            del calls[part.index]
    message: Json = {"content": "".join(texts[Content]) or (None if calls else "")}
    if texts[Reasoning]:
        message["reasoning_content"] = "".join(texts[Reasoning])
    if calls:
        message["tool_calls"] = [
            {"id": call_id(), "type": "function", "function": {"name": name, "arguments": "".join(arguments)}}
            for name, arguments in calls.values()
        ]
    return message


def delta_of(parts: Iterable[Part], call_id: Callable[[], str]) -> Json:
    """Return the delta of a round's parts. Each call is in it once: clients match its entries by index."""
    delta: Json = {}
    calls: dict[int, Json] = {}
    for part in parts:
        if isinstance(part, Content | Reasoning):
            name = "content" if isinstance(part, Content) else "reasoning_content"
            delta[name] = delta.get(name, "") + part.text
        elif isinstance(part, CallBegun):
            function = {"name": part.name, "arguments": ""}
            calls[part.index] = {"index": part.index, "id": call_id(), "type": "function", "function": function}
        elif isinstance(part, Arguments):
            call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += part.text
        elif "id" in calls.get(part.index, {}):
            del calls[part.index]  # begun in this very round, so nobody has heard of it
    return delta | {"tool_calls": list(calls.values())} if calls else delta


def joined(outputs: Sequence[RoundOutput]) -> RoundOutput:
    """Return all rounds of an answer as one."""
    tokens = tuple(token for output in outputs for token in output.tokens)
    text, scores = "".join(output.text_delta for output in outputs), outputs[0].prompt_logprobs
    return replace(outputs[-1], tokens=tokens, text_delta=text, prompt_logprobs=scores)


def with_scores(outputs: Sequence[RoundOutput], num_choices: int) -> list[RoundOutput]:
    """Return whole answers, each with its prompt's log-probs: a target says them with a prompt's first choice alone."""
    firsts = [outputs[index - index % num_choices] for index in range(len(outputs))]
    return [replace(each, prompt_logprobs=first.prompt_logprobs) for each, first in zip(outputs, firsts, strict=True)]


def mean_logprob(output: RoundOutput) -> float:
    """Return the log-prob a token of an answer whose tokens have them."""
    found = [token.logprobs.logprob for token in output.tokens if token.logprobs is not None]
    return sum(found) / len(found) if found else 0.0


def _ending(output: RoundOutput, has_calls: bool = False) -> Json:
    reason = None if output.finish_reason is None else output.finish_reason.value
    if has_calls and output.finish_reason is FinishReason.STOP:
        reason = "tool_calls"
    return {"finish_reason": reason, "stop_reason": output.stop_reason}


def usage_so_far(num_prompt_tokens: int, num_tokens: int) -> Json:
    """Return vLLM's usage of a choice that is not complete."""
    total = num_prompt_tokens + num_tokens
    return {"prompt_tokens": num_prompt_tokens, "completion_tokens": num_tokens, "total_tokens": total}


def usage_of(usages: Sequence[AnswerUsage], num_choices: int, num_reasoning_tokens: int = 0) -> Json:
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
        "completion_tokens_details": {**details, "reasoning_tokens": num_reasoning_tokens, "audio_tokens": 0},
        "speculation": {
            "num_rounds": rounds,
            "num_plain_steps": sum(usage.num_plain_steps for usage in usages),
            "plain_reason": most_common_reason(usage.plain_reasons for usage in usages),
            "num_draft_tokens": drafted,
            "num_accepted_tokens": accepted,
            "acceptance_rate": accepted / drafted if drafted else None,
            "mean_accepted_length": 1 + accepted / rounds if rounds else None,
            "num_overrun_tokens": sum(usage.num_overrun_tokens for usage in usages),
            "mean_emitted_length": sum(usage.num_emitted_tokens for usage in usages) / rounds if rounds else None,
            "seed": seeds.pop() if len(seeds) == 1 else None,
            "seeds": [answers[0].seed for answers in prompts],
            "lenience": usages[0].lenience,
        },
    }
