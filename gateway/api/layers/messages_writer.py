"""Writes responses of Anthropic's Messages API: their content blocks, and the events of a stream. No I/O."""

from __future__ import annotations

from collections.abc import Iterator

import orjson

from gateway.api.http_io import anthropic_error_body
from gateway.api.layers.layer_answer import AnswerReader
from gateway.api.openai_responses import Json
from gateway.generation import FinishReason, GenerationRequest, RoundOutput
from gateway.tokenizer import Tokenizer
from gateway.tools.parts import Arguments, CallRetraction, CallStart, Content, Part, Reasoning
from outrider.wire.errors import OutriderError


class MessageWriter:
    """Writes one response of /v1/messages, as a whole or as stream events, from the outputs that are pushed to it.

    It implements `gateway.api.layers.layer_answer.AnswerWriter`.
    """

    def __init__(self, max_tokens: int, answer_id: str, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        """Create the writer of a response without content.

        max_tokens: value in the request's body, which may be more than the context leaves. answer_id: id of the
        message.
        """
        self._id = answer_id
        self._is_limited_by_context = request.params.max_tokens < max_tokens
        self._request = request
        self._answer = AnswerReader(request.reading)
        self._blocks: list[Json] = []
        """Content blocks of the message. The last one is open while `_is_open`; its text is then in `_texts`."""
        self._is_open = False
        self._index = -1
        """Index of the last block in the stream's events. Tool calls that turned out to be text also have an index."""
        self._texts: list[str] = []
        """Pieces of the text, or of the arguments, of the open block."""
        self._stop: Json = {"stop_reason": None, "stop_sequence": None}
        # A stream begins before it is known how much was cached: message_start counts nothing as cached.
        self._usage: Json = {
            "input_tokens": len(request.caller_prompt_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
        }

    def begin(self) -> Iterator[Json]:
        yield {"type": "message_start", "message": self.whole()}
        yield {"type": "ping"}

    def push(self, output: RoundOutput) -> Iterator[Json]:
        for part in self._answer.parts(output):
            yield from self._add_part(part)
        if output.finish_reason is None:
            return
        yield from self._close()
        self._stop = self._stop_of(output)
        self._usage = self._usage_of(output)
        yield {"type": "message_delta", "delta": self._stop, "usage": self._usage}
        yield {"type": "message_stop"}

    def without_text(self) -> Json:
        return {"type": "ping"}

    def failed(self, error: OutriderError) -> Iterator[Json]:
        yield anthropic_error_body(error)

    def whole(self) -> Json:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._request.model}
        return {**head, "content": list(self._blocks), **self._stop, "usage": self._usage}

    def _stop_of(self, output: RoundOutput) -> Json:
        if output.finish_reason is FinishReason.LENGTH:
            if self._is_limited_by_context:
                return {"stop_reason": "model_context_window_exceeded", "stop_sequence": None}
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(output.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": output.stop_reason}
        if self._answer.has_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage_of(self, output: RoundOutput) -> Json:
        # Anthropic counts cached tokens apart from the other tokens of the input.
        usage = self._answer.usage(output)
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
            "speculation": usage["speculation"],
        }

    def _add_part(self, part: Part) -> Iterator[Json]:
        if isinstance(part, CallRetraction):
            yield from self._close()
            self._blocks.pop()
        elif isinstance(part, CallStart):
            block = {"type": "tool_use", "id": self._answer.call_id(part), "name": part.name, "input": {}}
            yield from self._open(block)
        elif isinstance(part, Arguments):
            self._texts.append(part.text)
            yield self._delta({"type": "input_json_delta", "partial_json": part.text})
        elif isinstance(part, Content):
            yield from self._add_text("text", part.text, {})
        elif isinstance(part, Reasoning):
            yield from self._add_text("thinking", part.text, {"signature": ""})

    def _add_text(self, kind: str, text: str, more_fields: Json) -> Iterator[Json]:
        if not self._is_open or self._blocks[-1]["type"] != kind:
            yield from self._open({"type": kind, kind: "", **more_fields})
        self._texts.append(text)
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _open(self, block: Json) -> Iterator[Json]:
        yield from self._close()
        self._blocks.append(block)
        self._is_open = True
        self._texts = []
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": dict(block)}

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> Iterator[Json]:
        if not self._is_open:
            return
        block = self._blocks[-1]
        text = "".join(self._texts)
        if block["type"] == "tool_use":
            block["input"] = _arguments_object(text)
        else:
            block[block["type"]] = text
        self._is_open = False
        yield {"type": "content_block_stop", "index": self._index}


def _arguments_object(text: str) -> Json:
    try:
        arguments = orjson.loads(text)
    except ValueError:  # cut short by the limit of tokens, which no object can show
        return {}
    if not isinstance(arguments, dict):
        return {}
    return arguments
