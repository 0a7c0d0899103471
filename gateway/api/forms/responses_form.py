"""An answer in the words of OpenAI's Responses API: its items, and the events that tell how they grow. Pure."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from gateway.api.forms.layers import ReadAnswer
from gateway.api.forms.responses_schemas import ResponsesBody
from gateway.api.forms.responses_tools import NamespaceTool, ResponsesTool
from gateway.api.http_io import shortened
from gateway.api.logprobs import Json, chat_logprobs
from gateway.api.schemas.messages import CUSTOM_INPUT
from gateway.generation import FinishReason, GenerationRequest, OutputToken, RoundOutput
from gateway.tokenizer import Tokenizer
from gateway.tools.reader import Arguments, CallBegun, CallUnread, Content, Part, Reasoning
from outrider.wire.errors import OutriderError, Overloaded

CALLS = ("function_call", "custom_tool_call")
"""Types of items that have no parts."""


class ResponseForm:
    def __init__(self, body: ResponsesBody, answer_id: str, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self._body = body
        self._id = answer_id
        self._request = request
        self._tokenizer = tokenizer
        self._answer = ReadAnswer(request.reading)
        self._created = int(time.time())
        self._num_events = 0
        self._num_items = 0
        """Those that a stream has told, with calls that turned out to be none."""
        self._items: list[Json] = []
        """The last one may be open."""
        self._is_open = False
        self._texts: list[str] = []
        """Of the open item."""
        self._logprobs: list[Json] = []
        """Of the open item's text."""
        self._untold: deque[OutputToken] = deque()
        """Those past the last text that was told, where their log-probs are."""
        self._status = "in_progress"
        self._error: Json | None = None
        self._usage: Json | None = None

    def begin(self) -> Iterator[Json]:
        yield self._event("created", response=self.whole())
        yield self._event("in_progress", response=self.whole())

    def push(self, output: RoundOutput) -> Iterator[Json]:
        if self._body.logprobs:
            self._untold += output.tokens
        for part in self._answer.parts(output):
            yield from self._take(part)
        if output.finish_reason is None:
            return
        if not self._items:
            yield from self._open("message")
        is_cut = output.finish_reason is FinishReason.LENGTH
        self._status = "incomplete" if is_cut else "completed"
        if self._is_open:
            yield from self._close(self._status)
        self._usage = self._usage_of(output)
        yield self._event(self._status, response=self.whole())

    def without_text(self) -> Json:
        return self._event("speculation")

    def failed(self, error: OutriderError) -> Iterator[Json]:
        code = "rate_limit_exceeded" if isinstance(error, Overloaded) else "server_error"
        self._status, self._error = "failed", {"code": code, "message": shortened(error.message)}
        yield self._event("failed", response=self.whole())

    def whole(self) -> Json:
        body, choice = self._body, self._body.tool_choice
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "status": self._status,
            "background": False,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self._request.model,
            "output": list(self._items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": None if body.reasoning is None else body.reasoning.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": self._request.params.temperature,
            "text": {"format": self._format()},
            "tool_choice": {"type": "function", "name": choice[0]} if isinstance(choice, tuple) else choice or "auto",
            "tools": told_tools(body.tools or ()),
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self._request.params.top_p,
            "truncation": "disabled",
            "usage": self._usage,
            "user": body.user,
        }

    def _format(self) -> Json:
        asked = None if self._body.text is None else self._body.text.format
        if asked is None:
            return {"type": "text"}
        told = asked.model_dump(by_alias=True, exclude_none=True)
        return {"name": "", **told} if asked.type == "json_schema" else told  # OpenAI's form has it in any case

    def _usage_of(self, output: RoundOutput) -> Json:
        usage = self._answer.usage(output)
        reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage["total_tokens"],
            "speculation": usage["speculation"],
        }

    def _take(self, part: Part) -> Iterator[Json]:
        if isinstance(part, CallUnread):
            yield from self._close("incomplete")
            self._items.pop()
        elif isinstance(part, CallBegun):
            tool = self._body.offered[part.name]
            yield from self._open(tool.call_type, call_id=self._answer.call_id(), **tool.item_fields())
        elif isinstance(part, Arguments):
            self._texts.append(part.text)
            if self._items[-1]["type"] == "function_call":
                yield self._told("function_call_arguments.delta", delta=part.text)
        else:
            kind = "reasoning" if isinstance(part, Reasoning) else "message"
            if not self._is_open or self._items[-1]["type"] != kind:
                yield from self._open(kind)
            self._texts.append(part.text)
            if isinstance(part, Content):
                logprobs = self._logprobs_of(part)
                yield self._told("output_text.delta", content_index=0, delta=part.text, logprobs=logprobs)
            else:
                yield self._told("reasoning_text.delta", content_index=0, delta=part.text)

    def _open(self, kind: str, **fields: Any) -> Iterator[Json]:
        if self._is_open:
            yield from self._close("completed")
        kinds: dict[str, tuple[str, Json]] = {
            "message": ("msg", {"role": "assistant", "content": []}),
            "reasoning": ("rs", {"summary": [], "content": [], "encrypted_content": None}),
            "function_call": ("fc", {"arguments": ""}),
            "custom_tool_call": ("ctc", {"input": ""}),
        }
        prefix, own = kinds[kind]
        item = {"id": f"{prefix}_{secrets.token_hex(16)}", "type": kind, "status": "in_progress", **fields, **own}
        self._items.append(item)
        self._num_items += 1
        self._is_open, self._texts, self._logprobs = True, [], []
        yield self._event("output_item.added", output_index=self._num_items - 1, item=dict(item))
        if kind not in CALLS:
            yield self._told("content_part.added", content_index=0, part=self._part(kind, ""))

    def _close(self, status: str) -> Iterator[Json]:
        item, text = self._items[-1], "".join(self._texts)
        kind = item["type"]
        if kind == "function_call":
            item["arguments"] = text
            yield self._told("function_call_arguments.done", arguments=text)
        elif kind == "custom_tool_call":
            item["input"] = custom_input(text)
            yield self._told("custom_tool_call_input.delta", delta=item["input"])
            yield self._told("custom_tool_call_input.done", input=item["input"])
        else:
            part = self._part(kind, text)
            item["content"] = [part]
            if kind == "message":
                yield self._told("output_text.done", content_index=0, text=text, logprobs=self._logprobs)
            else:
                yield self._told("reasoning_text.done", content_index=0, text=text)
            yield self._told("content_part.done", content_index=0, part=part)
        item["status"] = status
        self._is_open = False
        yield self._event("output_item.done", output_index=self._num_items - 1, item=dict(item))

    def _part(self, kind: str, text: str) -> Json:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    def _logprobs_of(self, part: Content) -> list[Json]:
        """Return those of the text's tokens. Those of reasoning and of calls before it are told nowhere."""
        begin, tokens = part.end - len(part.text), list[OutputToken]()
        while self._untold and self._untold[0].text_offset < part.end:
            token = self._untold.popleft()
            if token.text_offset + max(1, len(token.text)) > begin:
                tokens.append(token)
        new: list[Json] = chat_logprobs(tokens, self._tokenizer)["content"]
        self._logprobs += new
        return new

    def _told(self, name: str, **fields: Any) -> Json:
        """Return an event about the open item."""
        return self._event(name, item_id=self._items[-1]["id"], output_index=self._num_items - 1, **fields)

    def _event(self, name: str, **fields: Any) -> Json:
        self._num_events += 1
        return {"type": f"response.{name}", "sequence_number": self._num_events - 1, **fields}


def told_tools(tools: Sequence[Any]) -> list[Json]:
    """Return the tools that the model was offered, as an answer tells of them."""
    told: list[Json] = []
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            told.append({**tool.model_dump(exclude_none=True), "tools": told_tools(tool.tools)})
        elif isinstance(tool, ResponsesTool) and tool.type == "function":
            function = {"type": "function", "name": tool.name, "description": tool.description}
            told.append({**function, "parameters": tool.parameters, "strict": bool(tool.strict)})
        elif isinstance(tool, ResponsesTool):
            told.append(tool.model_dump(exclude_none=True))
    return told


def custom_input(arguments: str) -> str:
    """Return the text that a tool is called with which takes any. Arguments that the limit of tokens cut short are
    returned as they are.
    """
    try:
        found = orjson.loads(arguments)
    except ValueError:
        return arguments
    text = found.get(CUSTOM_INPUT) if isinstance(found, dict) else None
    return text if isinstance(text, str) else arguments
