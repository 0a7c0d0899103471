"""Turns text and chats into token ids and back, with the `tokenizers` library. Front ends and the decode loop use it.

transformers would import torch, so the files of a checkpoint's tokenizer are read here. They come from the target
worker: the gateway needs no model folder. Chat templates follow Hugging Face's Jinja conventions and run in a sandbox,
since nobody vouches for them.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from typing import Any

import jinja2
import tokenizers
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.drafting.token_bytes import byte_level, fallback_byte
from outrider.v1 import common_pb2 as pb
from outrider.wire.errors import ConfigError, InvalidRequest
from outrider.wire.model_json import decode_text, parse_object
from outrider.wire.tokenizer_json import TOKENIZER_JSON, load_tokenizer

Message = dict[str, Any]
"""At least `role`, and `content`, text; None beside `tool_calls`, whose arguments are objects."""


class ChatTemplate:
    """Hold a compiled template. Raise ConfigError when the source is no template."""

    def __init__(self, source: str, special_tokens: dict[str, str], tool_source: str | None = None) -> None:
        """tool_source: the template that is taken where there are tools; None = the same."""
        self.source = source
        self.tool_source = source if tool_source is None else tool_source
        self._special_tokens = special_tokens
        self._knows_developer = "developer" in source
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self._tool_template = self._template if tool_source is None else environment.from_string(tool_source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"the chat template has a syntax error at line {error.lineno}: {error.message}") from None
        self.takes_tools = "tools" in meta.find_undeclared_variables(environment.parse(self.tool_source))

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        extra: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the messages as one text. Raise InvalidRequest with the template's own words when it refuses them."""
        names: dict[str, Any] = {"messages": [self._known(message) for message in messages], **self._special_tokens}
        names |= {"tools": list(tools) or None, "documents": None, "add_generation_prompt": add_generation_prompt}
        if clash := sorted(names.keys() & extra.keys()):
            raise InvalidRequest(f"chat_template_kwargs may not set {clash[0]}", param="chat_template_kwargs")
        try:
            return (self._tool_template if tools else self._template).render({**names, **extra})
        except Exception as error:  # whatever a template does to these messages is about these messages
            raise InvalidRequest(f"the chat template refuses the messages: {error}", param="messages") from None

    def _known(self, message: Message) -> Message:
        """Call the developer role by its older name, system, where the template does not know it."""
        if message["role"] == "developer" and not self._knows_developer:
            return {**message, "role": "system"}
        return message


def find_template(file_text: str, configured: Any, name: str = "default") -> str | None:
    """Return the template's source, or None where there is none.

    file_text: of chat_template.jinja, which comes first. configured: `chat_template` of tokenizer_config.json, a text
    or a list of {"name", "template"}, of which the one of this name is taken.
    """
    if file_text:
        return file_text
    if isinstance(configured, list):
        named = {entry.get("name"): entry.get("template") for entry in configured if isinstance(entry, dict)}
        configured = named.get(name)
    return configured if isinstance(configured, str) else None


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # without Jinja's HTML escapes
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


class _GenerationBlock(Extension):
    """Replace {% generation %}...{% endgeneration %}, which marks answers for training, by its contents."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        lineno = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(lineno)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Piece = bytes | str | None
"""A token adds raw bytes of UTF-8 to a text, or text whose spacing depends on its neighbours, or nothing."""


class Tokenizer:
    """Encode and decode one model's text. Raise ConfigError, naming the file, when the files cannot be used."""

    def __init__(self, tokenizer_json: str, special_tokens: dict[str, str], template: ChatTemplate | None) -> None:
        data = tokenizer_json.encode()
        self._tokenizer = load_tokenizer(data)  # which cuts nothing: lengths are checked against the model's context
        decoder = parse_object(data, TOKENIZER_JSON).get("decoder")
        self.special_tokens = special_tokens
        self.template = template
        added = self._tokenizer.get_added_tokens_decoder()
        self._silent = frozenset(token.content for token in added.values() if token.special)
        self._controls = {token.content: token_id for token_id, token in added.items() if _is_control(token)}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._byte_level, self._byte_fallback = _byte_rules(decoder)
        self._pieces: dict[int, Piece] = {}

    @classmethod
    def from_files(cls, files: pb.TokenizerFiles, chat_template_override: str | None = None) -> Tokenizer:
        """Read the files; chat_template_override is a Jinja template that replaces the tokenizer's own."""
        config = _config_of(files.tokenizer_config_json)
        special = {name: text for name in _SPECIAL_NAMES if (text := _content(config.get(name))) is not None}
        text, configured = files.chat_template.decode("utf-8"), config.get("chat_template")
        source, tool_source = find_template(text, configured), find_template(text, configured, "tool_use")
        if chat_template_override is not None:
            source, tool_source = chat_template_override, None
        template = None if source is None else ChatTemplate(source, special, tool_source)
        return cls(decode_text(files.tokenizer_json, TOKENIZER_JSON), special, template)

    @property
    def vocab_size(self) -> int:
        """Return how many ids the tokenizer knows, added tokens included; a model's logits may be wider."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the text's ids; with add_special_tokens the tokenizer's post-processor adds its own.

        It releases the GIL, unlike the library's `encode`. Raise InvalidRequest when `text` holds lone surrogates.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"text holds a lone surrogate at character {error.start}; send valid Unicode"
            ) from None
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def chat_text(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        names: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """Return the messages in the chat template; names are more variables for it, as enable_thinking.

        Raise InvalidRequest when there is no template or when it refuses the messages.
        """
        if self.template is None:
            raise InvalidRequest(
                "this model has no chat template; use /v1/completions, or give the gateway a file of one: "
                "--chat-template, with outrider up the variable OUTRIDER_GATEWAY_CHAT_TEMPLATE",
                param="messages",
            )
        return self.template.render(messages, add_generation_prompt, names or {}, tools)

    def control_id(self, text: str) -> int | None:
        """Return the id of the token of this text that is no text to a grammar, None for other texts."""
        return self._controls.get(text)

    def silent_id(self, text: str) -> int | None:
        """Return the id of the special token of this text, which `decode` leaves out; None for other texts."""
        return self._controls.get(text) if text in self._silent else None

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text. Ids past the vocabulary add nothing, nor do special tokens where they are to be skipped;
        invalid UTF-8 shows as U+FFFD.
        """
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_name(self, token_id: int) -> str | None:
        """Return the token as the vocabulary writes it, None for an id past it."""
        name: str | None = self._tokenizer.id_to_token(token_id)
        return name

    def piece(self, token_id: int) -> Piece:
        """Return what `token_id` adds to a decoded text. The cache holds at most one entry per id of the vocabulary."""
        try:
            return self._pieces[token_id]
        except KeyError:
            token = self._tokenizer.id_to_token(token_id)
            piece = None if token is None or token in self._silent else self._piece_of(token)
            if token is not None:
                self._pieces[token_id] = piece
            return piece

    def _piece_of(self, token: str) -> Piece:
        if self._byte_level:
            return byte_level(token)
        return (fallback_byte(token) if self._byte_fallback else None) or token

    def utf8_decoder(self) -> codecs.IncrementalDecoder:
        """Return a decoder that turns `bytes` pieces into text as `decode` would.

        Byte fallback marks each bad byte, ByteLevel each run of them.
        """
        return codecs.getincrementaldecoder("utf-8")("outrider-each" if self._byte_fallback else "replace")

    def token_text(self, token_id: int) -> str:
        """Return the token's own text, special tokens by name; parts of a UTF-8 character show as U+FFFD."""
        piece = self.piece(token_id)
        if isinstance(piece, bytes):
            return piece.decode("utf-8", "replace")
        if piece is None:
            return self._tokenizer.id_to_token(token_id) or ""
        before = self.decode(self._anchor)  # in front of nothing, many decoders drop a token's leading space
        return self.decode([*self._anchor, token_id])[len(before) :]

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the token's bytes, None for an id past the vocabulary."""
        piece = self.piece(token_id)
        if isinstance(piece, bytes):
            return piece
        text = self.token_text(token_id)
        return text.encode("utf-8") if text or piece is not None else None

    @cached_property
    def _anchor(self) -> list[int]:
        """Find one id whose text is a plain word, to stand before another token."""
        for token_id in range(self.vocab_size):
            if isinstance(self.piece(token_id), str) and self.decode([token_id]).strip().isalnum():
                return [token_id]
        return []


def _is_control(token: tokenizers.AddedToken) -> bool:
    """As llguidance sees it: a special token, or one in angle brackets, is no text."""
    content: str = token.content
    return bool(token.special) or (content.startswith("<") and content.endswith(">"))


def _byte_rules(decoder: dict[str, Any] | None) -> tuple[bool, bool]:
    """Return whether all tokens are bytes, and whether `<0xNN>` tokens are. Raise ConfigError for a mix of both."""
    parts = [] if decoder is None else decoder.get("decoders", [decoder])
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds and not kinds <= {"ByteLevel", "Fuse"}:
        raise ConfigError(
            f"tokenizer.json decodes with {sorted(kinds)}; ByteLevel together with others cannot be streamed"
        )
    return "ByteLevel" in kinds, "ByteFallback" in kinds


def _config_of(data: bytes) -> dict[str, Any]:
    return parse_object(data or b"{}", "tokenizer_config.json")


def _content(token: Any) -> str | None:
    """Read a special token as tokenizer_config.json spells it: text, or an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _replace_each(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("outrider-each", _replace_each)
