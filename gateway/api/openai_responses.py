"""Writes outputs as the choices and chunks of /v1/completions and /v1/chat/completions: plain dicts, for orjson.

`gateway.api.openai_answers` calls it. The writers in `gateway.api.layers` parse text with its `ChoiceReader`, too. No
I/O.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gateway.api.logprobs import PromptFields, chat_logprobs, completion_logprobs
from gateway.api.speculation_answers import speculation_of
from gateway.generation import FinishReason, OutputToken, RoundOutput
from gateway.tokenizer import Tokenizer
from gateway.tools.call_families import CallIds
from gateway.tools.parts import Arguments, CallStart, Content, Part, Reasoning
from gateway.tools.reader import CallReader
from gateway.tools.reading import Reading

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CompletionWriter:
    """Writes the choices of a response of /v1/completions, whole or as chunks of a stream."""

    tokenizer: Tokenizer
    logprobs: bool
    """Whether the client asks for log-probs."""
    echoes: Sequence[str]
    """echoes[i]: text of the prompt of choice i, which is put before the choice's text. Empty if the request has no
    `echo`."""
    token_kinds: bool = False
    """Whether each choice has a field `speculation`, with the kinds of its tokens and, if the request sets `explain`,
    what its rounds verified."""
    prompts: PromptFields | None = None
    """Writes the fields that `PromptFields` names; None if the client asks for none of them."""
    num_reasoning_tokens = 0
    object = chunk_object = "text_completion"

    def choice(self, index: int, output: RoundOutput) -> Json:
        """Return the entry of the response's `choices` for the choice at `index`, made of its whole output."""
        return self._choice(index, output, first=True)

    def chunk(self, index: int, output: RoundOutput, first: bool) -> Json | None:
        """Return the entry of a stream chunk's `choices` for the choice at `index`; None if `output` adds nothing.

        first: whether `output` is the choice's first output, whose entry is never None and has the prompt's fields.
        """
        if first or output.text_delta or output.finish_reason or self._reports_tokens:
            return self._choice(index, output, first)
        return None

    @property
    def _reports_tokens(self) -> bool:
        return self.logprobs or self.token_kinds or (self.prompts is not None and self.prompts.token_ids)

    def _choice(self, index: int, output: RoundOutput, first: bool) -> Json:
        text = output.text_delta
        if first and self.echoes:
            text = self.echoes[index] + text
        choice = {"index": index, "text": text, "logprobs": self._logprobs(index, output, first), **_ending(output)}
        if self.token_kinds:
            choice["speculation"] = speculation_of(output, self.tokenizer)
        if self.prompts is not None:
            choice |= self.prompts.choice_fields(output)
            if first:
                choice |= self.prompts.prompt_fields(index, output)
        return choice

    def _logprobs(self, index: int, output: RoundOutput, first: bool) -> Json | None:
        if not self.logprobs:
            return None
        logprobs = completion_logprobs(output.tokens, self.tokenizer)
        if self.prompts is None or not self.echoes:
            return logprobs
        echo_len = len(self.echoes[index])
        logprobs["text_offset"] = [echo_len + offset for offset in logprobs["text_offset"]]
        if first:
            logprobs = self.prompts.with_prompt(index, output, logprobs)
        return logprobs

    def answer_fields(self, index: int, output: RoundOutput) -> Json:
        """Return an empty dict: a response of /v1/completions has no fields about prompts outside of its choices."""
        return {}


@dataclass(frozen=True, slots=True)
class ChatWriter:
    """Writes the choices of a response of /v1/chat/completions, whole or as chunks of a stream.

    The outputs of each choice must be passed once, in order, because the writer parses them for tool calls and
    reasoning.
    """

    tokenizer: Tokenizer
    logprobs: bool
    """Whether the client asks for log-probs."""
    readings: Sequence[Reading | None]
    """readings[i]: how to find tool calls and reasoning in the output of choice i; None to leave its text as it is."""
    token_kinds: bool = False
    """Whether each choice has a field `speculation`, with the kinds of its tokens and, if the request sets `explain`,
    what its rounds verified."""
    prompts: PromptFields | None = None
    """Writes `prompt_token_ids`, `prompt_logprobs` and `token_ids`; None if the client asks for none of them."""
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    _readers: dict[int, ChoiceReader] = field(default_factory=dict)

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens in all choices so far."""
        return sum(reader.num_reasoning_tokens for reader in self._readers.values())

    def choice(self, index: int, output: RoundOutput) -> Json:
        """Return the entry of the response's `choices` for the choice at `index`, made of its whole output."""
        message = {"role": "assistant", "content": output.text_delta, "refusal": None}
        has_calls = False
        reader = self._reader(index)
        if reader is not None:
            message |= message_of(reader.read(output), reader.call_id)
            has_calls = reader.has_calls
        return {"index": index, "message": message, **self._common_fields(output, has_calls)}

    def chunk(self, index: int, output: RoundOutput, first: bool) -> Json | None:
        """Return the entry of a stream chunk's `choices` for the choice at `index`; None if `output` adds nothing.

        first: whether `output` is the choice's first output, whose entry is never None and has the role.
        """
        delta: Json = {"content": output.text_delta}
        has_calls = False
        reader = self._reader(index)
        if reader is not None:
            delta = delta_of(reader.read(output), reader.call_id)
            has_calls = reader.has_calls
        if not (first or any(delta.values()) or output.finish_reason or self._reports_tokens):
            return None
        if first:
            delta = {"role": "assistant", "content": "", **delta}
        return {"index": index, "delta": delta, **self._common_fields(output, has_calls)}

    def answer_fields(self, index: int, output: RoundOutput) -> Json:
        """Return the response's `prompt_token_ids` and `prompt_logprobs`, if the client asks for them.

        output: first output of the choice at `index`. All choices have the same prompt, so an index other than 0 gives
        an empty dict.
        """
        if self.prompts is None or index:
            return {}
        return self.prompts.prompt_fields(index, output)

    @property
    def _reports_tokens(self) -> bool:
        return self.logprobs or self.token_kinds or (self.prompts is not None and self.prompts.token_ids)

    def _common_fields(self, output: RoundOutput, has_calls: bool) -> Json:
        fields: Json = {"logprobs": None, **_ending(output, has_calls)}
        if self.logprobs:
            fields["logprobs"] = chat_logprobs(output.tokens, self.tokenizer)
        if self.token_kinds:
            fields["speculation"] = speculation_of(output, self.tokenizer)
        if self.prompts is not None:
            fields |= self.prompts.choice_fields(output)
        return fields

    def _reader(self, index: int) -> ChoiceReader | None:
        reading = self.readings[index]
        if reading is not None and index not in self._readers:
            self._readers[index] = ChoiceReader(reading)
        return self._readers.get(index)


class ChoiceReader:
    """Splits the outputs of one choice into text, tool calls and reasoning."""

    def __init__(self, reading: Reading) -> None:
        self._reader: CallReader = reading.reader()
        self._ids = CallIds.ANY
        if reading.family is not None:
            self._ids = reading.family.ids
        self._num_previous_calls = reading.num_previous_calls
        self._offsets: list[int] = []
        """Number of characters of text before each token, for the tokens up to the end of the reasoning."""
        self.num_reasoning_tokens = 0

    @property
    def has_calls(self) -> bool:
        """Whether the outputs so far contain a complete tool call."""
        return self._reader.num_calls > 0

    def read(self, output: RoundOutput) -> list[Part]:
        """Parse the output of one round, and return the parts that can be recognised by now."""
        was_reasoning = self._reader.reasoning_end is None
        parts = self._reader.push(output.text_delta)
        if output.finish_reason is not None:
            is_cut = output.finish_reason is FinishReason.LENGTH or output.stop_reason is not None
            parts += self._reader.finish(is_cut)
        if was_reasoning:
            self._offsets += [token.text_offset for token in output.tokens]
            self.num_reasoning_tokens = self._count_reasoning_tokens()
        return parts

    def _count_reasoning_tokens(self) -> int:
        end = self._reader.reasoning_end
        if end is None:
            return len(self._offsets)
        return sum(offset < end for offset in self._offsets)

    def call_id(self, index: int, name: str) -> str:
        """Return a new id for a tool call, in the form that the chat template accepts.

        index: index of the call among the calls of this choice. name: name of the called tool.
        """
        if self._ids is CallIds.NUMBERED:
            return f"functions.{name}:{self._num_previous_calls + index}"
        if self._ids is CallIds.ANY:
            return f"call_{secrets.token_hex(12)}"
        characters = string.ascii_letters + string.digits
        return "".join(secrets.choice(characters) for _ in range(9))


def message_of(parts: Iterable[Part], call_id: Callable[[int, str], str]) -> Json:
    """Return the fields of a chat message with these parts.

    call_id: function that returns a new id for a tool call, given the call's index and the tool's name.
    """
    content: list[str] = []
    reasoning: list[str] = []
    calls: dict[int, tuple[str, list[str]]] = {}
    for part in parts:
        if isinstance(part, Content):
            content.append(part.text)
        elif isinstance(part, Reasoning):
            reasoning.append(part.text)
        elif isinstance(part, CallStart):
            calls[part.index] = (part.name, [])
        elif isinstance(part, Arguments):
            calls[part.index][1].append(part.text)
        else:
            del calls[part.index]
    message: Json = {"content": "".join(content)}
    if calls and not message["content"]:
        message["content"] = None
    if reasoning:
        message["reasoning_content"] = "".join(reasoning)
    if calls:
        message["tool_calls"] = [
            _call(call_id(index, name), name, "".join(texts)) for index, (name, texts) in calls.items()
        ]
    return message


def _call(call_id: str, name: str, arguments: str) -> Json:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def delta_of(parts: Iterable[Part], call_id: Callable[[int, str], str]) -> Json:
    """Return the `delta` of a chunk with the parts of one round.

    call_id: function that returns a new id for a tool call that begins, given the call's index and the tool's name.

    All parts of a call become one entry of `tool_calls`, because clients match entries by the call's index.
    """
    delta: Json = {}
    calls: dict[int, Json] = {}
    for part in parts:
        if isinstance(part, Content):
            delta["content"] = delta.get("content", "") + part.text
        elif isinstance(part, Reasoning):
            delta["reasoning_content"] = delta.get("reasoning_content", "") + part.text
        elif isinstance(part, CallStart):
            calls[part.index] = {"index": part.index, **_call(call_id(part.index, part.name), part.name, "")}
        elif isinstance(part, Arguments):
            call = calls.setdefault(part.index, {"index": part.index, "function": {"arguments": ""}})
            call["function"]["arguments"] += part.text
        elif "id" in calls.get(part.index, {}):
            del calls[part.index]  # it began in this round, so it was never sent
    if calls:
        delta["tool_calls"] = list(calls.values())
    return delta


def join_outputs(outputs: Sequence[RoundOutput]) -> RoundOutput:
    """Return one output with the tokens and the text of all outputs of a choice, given in order."""
    tokens = list[OutputToken]()
    for output in outputs:
        tokens += output.tokens
    text = "".join(output.text_delta for output in outputs)
    return replace(outputs[-1], tokens=tuple(tokens), text_delta=text, prompt_logprobs=outputs[0].prompt_logprobs)


def with_prompt_logprobs(outputs: Sequence[RoundOutput], num_choices: int) -> list[RoundOutput]:
    """Return the whole outputs of all choices, each with the log-probs of its prompt.

    outputs: `num_choices` consecutive whole outputs for each prompt. The target sends the log-probs of a prompt once,
    so only the first output of each prompt has them. The prompt's other outputs get a copy.
    """
    scored = []
    for index, output in enumerate(outputs):
        first = outputs[index - index % num_choices]
        scored.append(replace(output, prompt_logprobs=first.prompt_logprobs))
    return scored


def mean_logprob(output: RoundOutput) -> float:
    """Return the mean log-prob of an output's tokens; 0 if none has a log-prob."""
    logprobs = [token.logprobs.logprob for token in output.tokens if token.logprobs is not None]
    if not logprobs:
        return 0.0
    return sum(logprobs) / len(logprobs)


def _ending(output: RoundOutput, has_calls: bool = False) -> Json:
    reason = output.finish_reason and output.finish_reason.value
    if has_calls and output.finish_reason is FinishReason.STOP:
        reason = "tool_calls"
    return {"finish_reason": reason, "stop_reason": output.stop_reason}
