"""Renders and tokenises the prompts of one request: chats in the pool of renderers, long texts on threads."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from gateway.admission.agent_headers import without_agent_headers
from gateway.admission.text_threads import TextThreads
from gateway.chat_template import TextTooLong
from gateway.confined.template_messages import merge_leading_systems
from gateway.confined.template_shape import Message, text_of_content
from gateway.control_tokens import ControlTokenSplitter
from gateway.tokenizer import Tokenizer
from gateway.tools.offer import NO_TOOLS, ToolOffer, check_size
from gateway.tools.reading import ReasoningBudget
from outrider.wire.errors import ContextExceeded, InvalidRequest
from outrider.wire.settings.config import ContentControlTokens, GatewayConfig

INLINE_CHARS = 20_000
"""Maximal number of characters of one request that are tokenised on the event loop, which takes about 10 ms on one slow
core. Texts beyond it are tokenised on a thread."""
COUNTED_CONTEXTS = 8
"""Maximal length, in multiples of the context limit, of a prompt whose tokens are only counted. It exceeds 1 because
clients count the tokens of a text that they will split later."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt of messages, before the chat template renders it."""

    messages: tuple[Message, ...]
    add_generation_prompt: bool = True
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    tools: ToolOffer | None = NO_TOOLS
    """Tools that the request offers. None means that the output stays one text, from which neither tool calls nor
    reasoning are separated."""
    continues: bool = False
    """Whether the output continues the text of the last message."""
    documents: tuple[dict[str, Any], ...] = ()
    """Documents that are passed to the template, which may ignore them."""
    merges_leading: bool = False
    """Whether the system messages at the start of the chat are merged into one."""
    control_tokens: ContentControlTokens | None = None
    """Whether control tokens in messages stay control tokens (`allow`) or are taken as text (`text`). None:
    `ChatSettings.control_tokens` decides."""
    reasoning_budget: ReasoningBudget | None = None
    """Limit of the reasoning; None for any number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """The operator's settings for chats: limits of tools, and how system messages and control tokens are treated."""

    max_tools: int
    max_tools_bytes: int
    merges_systems: bool
    omits_agent_header: bool
    control_tokens: ContentControlTokens = "allow"
    """Whether control tokens in messages stay control tokens (`allow`) or are taken as text (`text`). It is `text` if
    the gateway's setting or the setting of the caller's API key is `text`."""

    @classmethod
    def from_config(cls, config: GatewayConfig) -> ChatSettings:
        """Return the settings for chats that a gateway's configuration contains."""
        return cls(
            max_tools=config.max_tools,
            max_tools_bytes=config.max_tools_bytes,
            merges_systems=config.system_messages == "merge",
            omits_agent_header=config.agent_header == "omit",
            control_tokens=config.control_tokens_in_content,
        )


def _pieces(text: str, splitter: ControlTokenSplitter | None) -> list[str]:
    if splitter is None:
        return [text]
    return text.split(splitter.separator)


class PromptReader:
    """Renders and tokenises the texts of one request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        context_limit: int,
        caller: bytes,
        threads: TextThreads,
        max_body_bytes: int,
        settings: ChatSettings,
        *,
        counts: bool = False,
    ) -> None:
        """Create a reader for one request.

        caller: digest of the API key, empty without one. max_body_bytes: maximal size of a request in bytes, also used
        as the limit of a rendered chat in characters. counts: whether tokens are only counted, so that COUNTED_CONTEXTS
        times the context limit is allowed.
        """
        self.tokenizer = tokenizer
        self._context_limit = context_limit
        self._caller = caller
        self._threads = threads
        self._max_body_bytes = max_body_bytes
        self._settings = settings
        self._num_chars = 0
        self._counts = counts
        self._max_tokens = context_limit
        if counts:
            self._max_tokens *= COUNTED_CONTEXTS

    async def work(self, num_chars: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `work`, which reads texts of `num_chars` characters, and return its result.

        It runs on a thread if the calls for this request, with this one, read more than INLINE_CHARS characters; else
        on the event loop.
        """
        self._num_chars += num_chars
        if self._num_chars > INLINE_CHARS:
            return await self._threads.run(self._caller, num_chars, work, *args, **kwargs)
        return work(*args, **kwargs)

    async def encode_chat(
        self, name: str, pieces: Sequence[str], add_special_tokens: bool, max_ids: int | None
    ) -> tuple[int, ...]:
        """Return the token ids of a rendered chat: the last `max_ids` of them, or all if `max_ids` is None.

        name: name of the prompt's field, for errors. pieces: the chat's text as `render_pieces` returns it; no token
        spans two pieces. Raises ContextExceeded if `max_ids` is None and the chat does not fit the context.
        """
        text = "".join(pieces)
        if len(pieces) == 1:
            return await self.encode(name, text, add_special_tokens, max_ids)
        if max_ids is None:
            self._check_len(name, text)
        ids = await self.work(len(text), self.tokenizer.encode_pieces, pieces, add_special_tokens)
        if max_ids is not None:
            return tuple(ids[-max_ids:])
        if len(ids) > self._max_tokens:
            raise ContextExceeded(f"{name} has {len(ids)} tokens, {self._limit()}; shorten it", param=name)
        return tuple(ids)

    async def encode(
        self, name: str, text: str, add_special_tokens: bool, max_ids: int | None = None
    ) -> tuple[int, ...]:
        """Return the token ids of a text: the last `max_ids` of them, or all if `max_ids` is None.

        name: name of the text's field, for errors. Raises ContextExceeded if the text cannot fit the context, without
        tokenising all of it.
        """
        if max_ids is not None:
            return tuple(await self.work(len(text), self.tokenizer.last_ids, text, max_ids, add_special_tokens))
        self._check_len(name, text)
        if self._counts:
            return tuple(await self.work(len(text), self.tokenizer.encode, text, add_special_tokens))
        limit = self._context_limit
        ids = await self.work(len(text), self.tokenizer.ids_within, text, limit, add_special_tokens)
        if ids is None:
            raise ContextExceeded(
                f"{name} has more than {limit} tokens, the context limit is {limit}; shorten it", param=name
            )
        return tuple(ids)

    async def first_ids(self, text: str, max_ids: int) -> tuple[int, ...]:
        """Return the first `max_ids` token ids of a text, without special tokens that the tokenizer would add."""
        return tuple(await self.work(len(text), self.tokenizer.first_ids, text, max_ids))

    def _check_len(self, name: str, text: str) -> None:
        bounds = self.tokenizer.bounds
        if bounds.may_fit(text, self._max_tokens):
            return
        raise ContextExceeded(
            f"{name} has {len(text)} characters, {self._limit()} of at most {bounds.max_token_chars} characters; "
            "shorten it",
            param=name,
        )

    def _limit(self) -> str:
        if self._counts:
            return f"{COUNTED_CONTEXTS} times the context limit are counted, {self._max_tokens} tokens"
        return f"the context limit is {self._max_tokens} tokens"

    async def render(self, name: str, chat: Chat, *, is_cut: bool = False) -> str:
        """Return the text of a chat.

        name: name of the prompt's field, for errors. is_cut: whether only the end of the text will be used, so that the
        text may exceed the context.

        Raises InvalidRequest if the model has no template or the template refuses the chat, and ContextExceeded for a
        text that is too long.
        """
        return "".join(await self.render_pieces(name, chat, is_cut=is_cut))

    def _splitter(self, chat: Chat) -> ControlTokenSplitter | None:
        by_settings = self._settings.control_tokens
        by_request = chat.control_tokens
        if by_settings == "text" and by_request == "allow":
            raise InvalidRequest(
                "control_tokens_in_content is 'allow', and this server, or your API key, takes them as text; leave it "
                "out",
                param="control_tokens_in_content",
            )
        if "text" not in (by_settings, by_request):
            return None
        return ControlTokenSplitter(self.tokenizer.control_tokens)

    async def render_pieces(self, name: str, chat: Chat, *, is_cut: bool = False) -> list[str]:
        """Return the text of a chat in pieces, which `encode_chat` tokenises one by one.

        If control tokens in messages are taken as text, the chat's text is cut within each control token that a user
        wrote. Otherwise the whole text is one piece.

        name: name of the prompt's field, for errors. is_cut: whether only the end of the text will be used, so that the
        text may exceed the context.

        Raises InvalidRequest if the model has no template or the template refuses the chat, and ContextExceeded for a
        text that is too long.

            # a user wrote "a<eos>b": ["...a<", "eos>b..."], neither of which holds a control token
        """
        offer = chat.tools or NO_TOOLS
        check_size(offer, self._settings.max_tools, self._settings.max_tools_bytes)
        tools = [tool.for_template() for tool in offer.tools]
        template = self.tokenizer.template
        if template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions, or start the gateway with --chat-template FILE",
                param="messages",
            )
        messages = self._prepared(chat)
        end = ""
        documents = list(chat.documents)
        splitter = self._splitter(chat)
        if splitter is not None:
            try:
                # On a thread: it looks at each character.
                texts = (messages, tools, documents)
                messages, tools, documents = await self.work(INLINE_CHARS + 1, splitter.chat, *texts)
            except RecursionError:
                raise InvalidRequest("messages, tools or documents nest too deep; make them flatter") from None
        if chat.continues:
            # Marks where the text of the last message ends, whatever the template writes behind it.
            end = secrets.token_hex()
            last = messages[-1]
            messages[-1] = {**last, "content": f"{text_of_content(last['content'])}{end}"}
        max_chars = self._max_chars(is_cut)
        num_separator_chars = 0
        if splitter is not None:
            num_separator_chars = splitter.num_separators * len(splitter.separator)
        try:
            text = await template.render(
                messages,
                chat.add_generation_prompt and not chat.continues,
                chat.template_kwargs,
                tools,
                documents=documents,
                merges=self._settings.merges_systems,
                max_chars=max_chars + num_separator_chars,
                caller=self._caller,
            )
        except TextTooLong:
            raise ContextExceeded(
                f"{name} has more than {max_chars} characters in the chat template; {self._limit()}, and no text may "
                "be longer than max_body_bytes; shorten it",
                param=name,
            ) from None
        if not end:
            return _pieces(text, splitter)
        text, found, _ = text.rpartition(end)
        if not found:
            raise InvalidRequest(
                "continue_final_message is true, and the chat template does not show the text of the last message; "
                "leave it out",
                param="continue_final_message",
            )
        return _pieces(text, splitter)

    def _max_chars(self, is_cut: bool) -> int:
        max_chars = self._max_body_bytes
        if not is_cut:
            context_chars = self.tokenizer.bounds.max_text_chars(self._max_tokens)
            if context_chars is not None:
                max_chars = min(max_chars, context_chars)
        return max_chars

    def _prepared(self, chat: Chat) -> list[Message]:
        messages = list(chat.messages)
        if self._settings.omits_agent_header:
            messages = without_agent_headers(messages)
        if chat.merges_leading:
            messages = merge_leading_systems(messages)
        return messages
