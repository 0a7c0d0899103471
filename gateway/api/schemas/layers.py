"""The base class of the bodies of /v1/responses and /v1/messages, both converted to the UncheckedRequest of one chat.

Their own fields are read in `gateway.api.layers`. The UncheckedRequest is made by a ChatBody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from gateway.admission.prompts import Chat
from gateway.admission.request_checks import MAX_MESSAGES
from gateway.admission.unchecked_request import FieldNames, UncheckedRequest
from gateway.api.schemas.base import StrictSchema, described
from gateway.api.schemas.field_types import SEED
from gateway.api.schemas.messages import MessageBody
from gateway.api.schemas.openai import ChatBody
from gateway.api.schemas.parsing import parse_body
from gateway.api.schemas.speculation import SpeculationBody
from gateway.output_format import OutputFormat
from gateway.tools.offer import ToolOffer
from outrider.wire.errors import InvalidRequest
from outrider.wire.requests.params import MAX_SALT_BYTES, RANGES
from outrider.wire.requests.scheduling import MAX_TPOT_MS, PRIORITY
from outrider.wire.settings.config import ContentControlTokens

CHAT_FIELDS = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "speculation",
    "cache_salt",
    "priority",
    "max_tpot_ms",
    "stream",
    "control_tokens_in_content",
)
"""Fields that the bodies of /v1/responses and /v1/messages (`Layer`) share, by name and meaning, with the body of
/v1/chat/completions (`ChatBody`)."""


def chat_message(**fields: Any) -> MessageBody:
    """Return a chat message with these fields. Raises InvalidRequest for a field with a wrong name or type."""
    return parse_body(MessageBody, fields)


class Layer(StrictSchema):
    """Base class of the bodies of /v1/responses and /v1/messages, which are converted to a chat with one output.

    For every field, null stands for the default.
    """

    model: str | None = described(
        "id of the served pair; another id is 404. Must be given where several are served. Default: the only one"
    )
    temperature: float | None = described("0 is greedy. Default: the checkpoint's, or 1", RANGES["temperature"])
    top_p: float | None = described("Default: the checkpoint's, or 1", RANGES["top_p"])
    top_k: int | None = described("0 or -1 = off. Default: the checkpoint's, or 0", RANGES["top_k"], minimum=-1)
    min_p: float | None = described("as chat's. Default: the checkpoint's, or 0", RANGES["min_p"])
    presence_penalty: float | None = described("as chat's. Default: 0", RANGES["presence_penalty"])
    frequency_penalty: float | None = described("as chat's. Default: 0", RANGES["frequency_penalty"])
    repetition_penalty: float | None = described(
        "as chat's. Default: the checkpoint's, or 1", RANGES["repetition_penalty"]
    )
    seed: int | None = described("as chat's. Default: random", **SEED.schema)
    speculation: SpeculationBody | None = described("as chat's. Default: the server's")
    cache_salt: str | None = described("as chat's", minLength=1, maxLength=MAX_SALT_BYTES)
    priority: int | None = described("as chat's. Default: 0", PRIORITY)
    max_tpot_ms: float | None = described("as chat's. Default: as long as it takes", MAX_TPOT_MS)
    chat_template_kwargs: dict[str, Any] | None = described("as chat's")
    control_tokens_in_content: ContentControlTokens | None = described("as chat's")
    stream: bool | None = described("server-sent events. Default: false")

    def template_variables(self) -> dict[str, Any]:
        """Return the variables for the chat template, by name. Subclasses may add variables."""
        return self.chat_template_kwargs or {}

    def unchecked_chat_request(
        self,
        request_id: str,
        messages: Sequence[MessageBody],
        offer: ToolOffer,
        names: FieldNames,
        output: OutputFormat | None,
        **others: Any,
    ) -> UncheckedRequest:
        """Return the request, not yet tokenized, for one output to a chat of these messages.

        offer: tools that the model may call. names: names of this body's fields, for error messages. output: format
        that the output must have; None for any. others: values for further fields of the ChatBody. Raises
        InvalidRequest for no or too many messages, and for values that /v1/chat/completions refuses.
        """
        if not messages:
            raise InvalidRequest(f"{names.prompt} is empty; give a message", param=names.prompt)
        if len(messages) > MAX_MESSAGES:
            text = f"{names.prompt} has {len(messages)} messages of a chat, at most {MAX_MESSAGES} are allowed"
            raise InvalidRequest(text, param=names.prompt)
        fields: dict[str, Any] = {"messages": list(messages), "chat_template_kwargs": self.template_variables()}
        fields |= {name: getattr(self, name) for name in CHAT_FIELDS}
        unchecked = parse_body(ChatBody, fields | others).unchecked_request(request_id)
        (chat,) = unchecked.prompts
        assert isinstance(chat, Chat)
        budget = chat.reasoning_budget
        if budget is not None:
            budget = replace(budget, is_optional=True)
        chat = replace(chat, tools=offer, merges_leading=True, reasoning_budget=budget)
        return replace(unchecked, names=names, output=output, prompts=(chat,))
