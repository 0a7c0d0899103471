"""Writes responses of OpenAI's Responses API: their items, and the events of a stream. No I/O."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from gateway.api.http_io import shortened
from gateway.api.layers.layer_answer import AnswerReader
from gateway.api.layers.responses_schemas import ResponsesBody
from gateway.api.layers.responses_tools import NamespaceTool, ResponsesTool
from gateway.api.logprobs import Json, chat_logprobs
from gateway.api.schemas.messages import CUSTOM_INPUT
from gateway.generation import FinishReason, GenerationRequest, OutputToken, RoundOutput
from gateway.tokenizer import Tokenizer
from gateway.tools.parts import Arguments, CallRetraction, CallStart, Content, Part, Reasoning
from outrider.wire.errors import OutriderError, Overloaded

CALLS = ("function_call", "custom_tool_call")
"""Types of output items of /v1/responses that are tool calls. Items of other types have a list of content parts."""
EMPTY_ITEMS: dict[str, tuple[str, Json]] = {
    "message": ("msg", {"role": "assistant", "content": []}),
    "reasoning": ("rs", {"summary": [], "content": [], "encrypted_content": None}),
    "function_call": ("fc", {"arguments": ""}),
    "custom_tool_call": ("ctc", {"input": ""}),
}
"""For each type of output item of /v1/responses: the prefix of the item's id, and the fields of an item that has no
text yet."""


class ResponseWriter:
    """Writes one response of /v1/responses, as a whole or as stream events, from the outputs that are pushed to it.

    It implements `gateway.api.layers.layer_answer.AnswerWriter`.
    """

    def __init__(self, body: ResponsesBody, answer_id: str, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self._body = body
        self._id = answer_id
        self._request = request
        self._tokenizer = tokenizer
        self._answer = AnswerReader(request.reading)
        self._created = int(time.time())
        self._num_events = 0
        self._num_items = 0
        """Number of items in the stream's events. Tool calls that turned out to be text count, too."""
        self._items: list[Json] = []
        """Items of the response. The last one is open while `_is_open`; its text is then in `_texts`."""
        self._is_open = False
        self._texts: list[str] = []
        """Pieces of the text, the arguments or the input of the open item."""
        self._logprobs: list[Json] = []
        """Log-probs of the open item's text."""
        self._pending_tokens: deque[OutputToken] = deque()
        """Tokens after the last text that was sent; used only if log-probs are requested."""
        self._status = "in_progress"
        self._error: Json | None = None
        self._usage: Json | None = None

    def begin(self) -> Iterator[Json]:
        yield self._event("created", response=self.whole())
        yield self._event("in_progress", response=self.whole())

    def push(self, output: RoundOutput) -> Iterator[Json]:
        if self._body.logprobs:
            self._pending_tokens += output.tokens
        for part in self._answer.parts(output):
            yield from self._add_part(part)
        if output.finish_reason is None:
            return
        if not self._items:
            yield from self._open("message")
        self._status = "completed"
        if output.finish_reason is FinishReason.LENGTH:
            self._status = "incomplete"
        if self._is_open:
            yield from self._close(self._status)
        self._usage = self._usage_of(output)
        yield self._event(self._status, response=self.whole())

    def without_text(self) -> Json:
        return self._event("speculation")

    def failed(self, error: OutriderError) -> Iterator[Json]:
        code = "server_error"
        if isinstance(error, Overloaded):
            code = "rate_limit_exceeded"
        self._status = "failed"
        self._error = {"code": code, "message": shortened(error.message)}
        yield self._event("failed", response=self.whole())

    def whole(self) -> Json:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": self._completed_at(),
            "status": self._status,
            "background": False,
            "error": self._error,
            "incomplete_details": self._incomplete_details(),
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": self._request.model,
            "output": list(self._items),
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.effort, "summary": None},
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": self._request.params.temperature,
            "text": {"format": self._format()},
            "tool_choice": self._tool_choice(),
            "tools": shown_tools(body.tools or ()),
            "top_logprobs": body.top_logprobs or 0,
            "top_p": self._request.params.top_p,
            "truncation": "disabled",
            "usage": self._usage,
            "user": body.user,
        }

    def _completed_at(self) -> int | None:
        if self._status != "completed":
            return None
        return int(time.time())

    def _incomplete_details(self) -> Json | None:
        if self._status != "incomplete":
            return None
        return {"reason": "max_output_tokens"}

    def _tool_choice(self) -> Any:
        choice = self._body.tool_choice
        if isinstance(choice, tuple):
            return {"type": "function", "name": choice[0]}
        return choice or "auto"

    def _format(self) -> Json:
        text_format = self._body.text_format
        if text_format is None:
            return {"type": "text"}
        fields = text_format.model_dump(by_alias=True, exclude_none=True)
        if text_format.type == "json_schema":
            return {"name": "", **fields}  # required in OpenAI's type
        return fields

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

    def _add_part(self, part: Part) -> Iterator[Json]:
        if isinstance(part, CallRetraction):
            yield from self._close("incomplete")
            self._items.pop()
        elif isinstance(part, CallStart):
            tool = self._body.offered[part.name]
            yield from self._open(tool.call_type, call_id=self._answer.call_id(part), **tool.item_fields())
        elif isinstance(part, Arguments):
            self._texts.append(part.text)
            if self._items[-1]["type"] == "function_call":
                yield self._item_event("function_call_arguments.delta", delta=part.text)
        elif isinstance(part, Reasoning):
            yield from self._continue("reasoning", part.text)
            yield self._item_event("reasoning_text.delta", content_index=0, delta=part.text)
        elif isinstance(part, Content):
            yield from self._continue("message", part.text)
            logprobs = self._logprobs_of(part)
            yield self._item_event("output_text.delta", content_index=0, delta=part.text, logprobs=logprobs)

    def _continue(self, kind: str, text: str) -> Iterator[Json]:
        if not self._is_open or self._items[-1]["type"] != kind:
            yield from self._open(kind)
        self._texts.append(text)

    def _open(self, kind: str, **fields: Any) -> Iterator[Json]:
        if self._is_open:
            yield from self._close("completed")
        prefix, empty = EMPTY_ITEMS[kind]
        item = {"id": f"{prefix}_{secrets.token_hex(16)}", "type": kind, "status": "in_progress", **fields, **empty}
        self._items.append(item)
        self._num_items += 1
        self._is_open = True
        self._texts = []
        self._logprobs = []
        yield self._event("output_item.added", output_index=self._num_items - 1, item=dict(item))
        if kind not in CALLS:
            yield self._item_event("content_part.added", content_index=0, part=self._part(kind, ""))

    def _close(self, status: str) -> Iterator[Json]:
        item = self._items[-1]
        text = "".join(self._texts)
        kind = item["type"]
        if kind == "function_call":
            item["arguments"] = text
            yield self._item_event("function_call_arguments.done", arguments=text)
        elif kind == "custom_tool_call":
            item["input"] = custom_input(text)
            yield self._item_event("custom_tool_call_input.delta", delta=item["input"])
            yield self._item_event("custom_tool_call_input.done", input=item["input"])
        else:
            part = self._part(kind, text)
            item["content"] = [part]
            if kind == "message":
                yield self._item_event("output_text.done", content_index=0, text=text, logprobs=self._logprobs)
            else:
                yield self._item_event("reasoning_text.done", content_index=0, text=text)
            yield self._item_event("content_part.done", content_index=0, part=part)
        item["status"] = status
        self._is_open = False
        yield self._event("output_item.done", output_index=self._num_items - 1, item=dict(item))

    def _part(self, kind: str, text: str) -> Json:
        if kind == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    def _logprobs_of(self, part: Content) -> list[Json]:
        # Tokens of reasoning and of calls in front of the text are dropped: their log-probs have no field.
        begin = part.end - len(part.text)
        tokens: list[OutputToken] = []
        while self._pending_tokens and self._pending_tokens[0].text_offset < part.end:
            token = self._pending_tokens.popleft()
            if token.text_offset + max(1, len(token.text)) > begin:
                tokens.append(token)
        logprobs: list[Json] = chat_logprobs(tokens, self._tokenizer)["content"]
        self._logprobs += logprobs
        return logprobs

    def _item_event(self, name: str, **fields: Any) -> Json:
        return self._event(name, item_id=self._items[-1]["id"], output_index=self._num_items - 1, **fields)

    def _event(self, name: str, **fields: Any) -> Json:
        self._num_events += 1
        return {"type": f"response.{name}", "sequence_number": self._num_events - 1, **fields}


def shown_tools(tools: Sequence[Any]) -> list[Json]:
    """Return the tools that the model may call, in the form of the response's field `tools`."""
    shown: list[Json] = []
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            shown.append({**tool.model_dump(exclude_none=True), "tools": shown_tools(tool.tools)})
        elif isinstance(tool, ResponsesTool) and tool.type == "function":
            function = {"type": "function", "name": tool.name, "description": tool.description}
            shown.append({**function, "parameters": tool.parameters, "strict": bool(tool.strict)})
        elif isinstance(tool, ResponsesTool):
            shown.append(tool.model_dump(exclude_none=True))
    return shown


def custom_input(arguments: str) -> str:
    """Return the input text of a call of a custom tool.

    In the prompt a function with one text as its argument represents a custom tool. arguments: JSON arguments with
    which the model called this function. If max_tokens cut them short, they are returned unchanged.
    """
    # {"input": "ls"} -> ls
    try:
        fields = orjson.loads(arguments)
    except ValueError:
        return arguments
    if isinstance(fields, dict) and isinstance(fields.get(CUSTOM_INPUT), str):
        return str(fields[CUSTOM_INPUT])
    return arguments
