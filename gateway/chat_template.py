"""The chat template of a model, read from the model's files and rendered in the pool of renderers.

`read_tokenizer` creates it; `PromptReader` renders chats with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from gateway.confined.pool import ConfinedPool, NestsTooDeep, WorkExceeded, WorkFailed, WorkRefused
from gateway.confined.template_shape import Message, TemplateShape, with_message_tools
from outrider.wire.errors import ConfigError, InvalidRequest, OutriderError, Overloaded
from outrider.wire.telemetry.log import get_logger

log = get_logger(__name__)

FOR_TOOLS, FOR_DOCUMENTS = NAMED = ("tool_use", "rag")
"""Names of the templates that replace a model's default template: for chats with tools, and for chats with documents.
"""
MAX_SOURCE_CHARS = 1 << 20
"""Maximal size of a template's source, in characters. The source is sent to a renderer with each chat. The largest that
is known has 40,000."""
_TOOLS, _XML_TOOLS = _TOOL_VARIABLES = ("tools", "xml_tools")
"""Names of the variables from which templates read tools: the usual one, and SmolLM3's, which has functions alone."""
_REMEDY = "give the gateway another template: --chat-template FILE"


class Renderers(Protocol):
    """Interface of a pool of processes that compile chat templates, try them with trial messages, and render chats.
    `ConfinedPool` implements it.
    """

    async def run(self, caller: bytes, request: Any) -> Any: ...


def create_renderers(max_compile_s: float) -> ConfinedPool:
    """Return the pool of processes that renders the chat templates of all models.

    max_compile_s: CPU time that compiling or rendering one template may take, in seconds.
    """
    name = "the rendering of a chat template"
    return ConfinedPool("gateway.confined.templates", max_compile_s, name=name)


class TextTooLong(Exception):
    """A rendered chat has more characters than allowed."""


@dataclass(frozen=True, slots=True)
class TemplateFile:
    """Sources of a model's chat templates, and the file or setting from which they come."""

    name: str
    """Name of the file or setting that contains the default template, for errors."""
    source: str
    named: Mapping[str, str] = field(default_factory=dict)
    """Sources of further templates, by name. Only the names FOR_TOOLS and FOR_DOCUMENTS are used."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One template of a model, after a renderer process has compiled it and tried it with trial messages."""

    source: str
    variables: frozenset[str] = frozenset()
    """Names of the variables that the template reads."""
    shape: TemplateShape = field(default_factory=TemplateShape)

    @property
    def accepts_tools(self) -> bool:
        """Whether the template writes the tools that a request offers into the prompt."""
        return self.tool_variable is not None or self.shape.message_tools is not None

    @property
    def tool_variable(self) -> str | None:
        """Name of the variable from which the template reads the tools; None if it reads no such variable."""
        for name in _TOOL_VARIABLES:
            if name in self.variables:
                return name
        return None

    def chat_variables(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the template's variables for a chat that offers these tools, as {name: value}: `messages`, and one for
        the tools. If the template reads tools from the system message, they are added to a copy of that message.
        """
        variables: dict[str, Any] = {"messages": list(messages), _TOOLS: list(tools) or None}
        if tools and self.shape.message_tools is not None:
            variables["messages"] = with_message_tools(messages, tools, self.shape.message_tools)
        elif tools and self.tool_variable == _XML_TOOLS:
            variables[_XML_TOOLS] = [tool["function"] for tool in tools]
        return variables


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A model's default chat template, and its templates for tools and documents."""

    name: str
    """Name of the file or setting that contains the default template, for errors."""
    default: Variant
    named: Mapping[str, Variant]
    special_tokens: dict[str, str]
    renderers: Renderers

    @classmethod
    async def compiled(cls, file: TemplateFile, special_tokens: dict[str, str], renderers: Renderers) -> ChatTemplate:
        """Compile a model's templates in the renderer processes, try them with trial messages, and return the result.

        special_tokens: texts of the tokenizer's special tokens, by the name under which templates read them. Raises
        ConfigError, which names the file, if a template cannot be compiled within the limits.
        """
        default = await _compiled(file.name, file.source, special_tokens, renderers)
        named: dict[str, Variant] = {}
        for name, source in file.named.items():
            named[name] = await _compiled(f"{file.name} ({name})", source, special_tokens, renderers)
        return cls(file.name, default, named, special_tokens, renderers)

    @property
    def source(self) -> str:
        return self.default.source

    @property
    def tool_source(self) -> str:
        """Source of the template that is used for chats with tools."""
        return self._variant(has_tools=True, has_documents=False).source

    @property
    def marks_roles(self) -> bool:
        """Whether the template writes the role of each message. It does not for a model that only continues text."""
        return self.default.shape.marks_roles

    @property
    def accepts_tools(self) -> bool:
        """Whether the template for chats with tools writes the offered tools into the prompt."""
        return self._variant(has_tools=True, has_documents=False).accepts_tools

    def _variant(self, has_tools: bool, has_documents: bool) -> Variant:
        if has_tools:
            return self.named.get(FOR_TOOLS, self.default)
        if has_documents and "documents" not in self.default.variables:
            return self.named.get(FOR_DOCUMENTS, self.default)
        return self.default

    async def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        extra: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        documents: Sequence[Mapping[str, Any]] = (),
        merges: bool = True,
        max_chars: int,
        caller: bytes = b"",
    ) -> str:
        """Render a chat, and return its text.

        add_generation_prompt: whether the text ends with the beginning of the assistant's next message. extra: further
        variables of the template. merges: whether messages with roles that the template refuses are rewritten to roles
        that it accepts. max_chars: maximal length of the text, in characters. caller: digest of the caller; by it, the
        renderer processes are divided fairly between callers.

        Raises InvalidRequest if the template refuses the chat, with the message that the template gives, or if
        rendering exceeds a limit of time or memory. Raises TextTooLong for a text longer than `max_chars`.
        """
        variant = self._variant(bool(tools), bool(documents))
        if documents and "documents" not in variant.variables:
            raise InvalidRequest(
                "documents are given, and the chat template of this model has no place for them; put their text into "
                "a message",
                param="documents",
            )
        names: dict[str, Any] = {**self.special_tokens, **variant.chat_variables(messages, tools)}
        names |= {"documents": list(documents) or None, "add_generation_prompt": add_generation_prompt}
        if clash := sorted(names.keys() & extra.keys()):
            raise InvalidRequest(f"chat_template_kwargs may not set {clash[0]}", param="chat_template_kwargs")
        request = {"kind": "render", "source": variant.source, "names": {**names, **extra}, "max_chars": max_chars}
        request |= {"shape": variant.shape, "merges": merges}
        try:
            text: str | None = await self.renderers.run(caller, request)
        except WorkRefused as error:
            raise InvalidRequest(error.message, param=error.param) from None
        except WorkExceeded as error:
            raise InvalidRequest(
                f"the chat template takes more than {error} to render these messages; send fewer or shorter ones",
                param="messages",
            ) from None
        except NestsTooDeep:
            raise InvalidRequest("messages, tools or chat_template_kwargs nest too deep; make them flatter") from None
        except WorkFailed as error:
            log.error("%s could not be rendered: %s", self.name, error)
            raise OutriderError("internal error; the gateway's log has the place") from None
        if text is None:
            raise TextTooLong
        return text


async def _compiled(name: str, source: str, special_tokens: dict[str, str], renderers: Renderers) -> Variant:
    if len(source) > MAX_SOURCE_CHARS:
        raise ConfigError(f"{name} has {len(source)} characters, at most {MAX_SOURCE_CHARS} are allowed; {_REMEDY}")
    try:
        reads = await renderers.run(b"", {"kind": "check", "source": source})
    except WorkRefused as error:
        raise ConfigError(f"{name} {error.message}; {_REMEDY}") from None
    except WorkExceeded as error:
        raise ConfigError(f"{name} takes more than {error} to compile; {_REMEDY}") from None
    except Overloaded as error:
        raise WorkFailed(error.message) from None  # no fault of the template: it is read again
    return Variant(source, frozenset(reads), await _shape(name, source, special_tokens, renderers))


async def _shape(name: str, source: str, special_tokens: dict[str, str], renderers: Renderers) -> TemplateShape:
    try:
        return TemplateShape(**await renderers.run(b"", {"kind": "probe", "source": source, "names": special_tokens}))
    except WorkExceeded as error:
        log.warning("%s takes more than %s to be tried: messages go to it as texts", name, error)
        return TemplateShape()
    except Overloaded as error:
        raise WorkFailed(error.message) from None


def template_of_files(
    file: bytes, configured: Any, override: str | None, additional: Mapping[str, bytes] | None = None
) -> TemplateFile | None:
    """Return the templates of a model; None if it has none. Raises ConfigError for a file that is not UTF-8.

    file: content of chat_template.jinja, empty without one. configured: `chat_template` of tokenizer_config.json, which
    is a text, a list of {"name", "template"}, or an object with a template for each name; `file` takes precedence.
    override: the operator's template, which takes precedence over all; None without one. additional: contents of the
    files in the folder additional_chat_templates, by name.
    """
    if override is not None:
        return TemplateFile("the file of --chat-template", override)
    if file:
        file_name = "chat_template.jinja"
        sources = {"default": _decoded(file_name, file)}
    else:
        file_name = "chat_template of tokenizer_config.json"
        sources = _configured_sources(configured)
    for name, data in (additional or {}).items():
        sources[name] = _decoded(f"additional_chat_templates/{name}.jinja", data)
    default = sources.get("default")
    if default is None:
        return None
    return TemplateFile(file_name, default, {name: sources[name] for name in NAMED if name in sources})


def _configured_sources(configured: Any) -> dict[str, str]:
    """Return the templates by name. The last of two with one name counts, as in transformers.

    # "{{ messages }}" -> {"default": "{{ messages }}"}
    # [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}] -> {"default": "a", "tool_use": "b"}
    """
    if isinstance(configured, str):
        return {"default": configured}
    pairs: list[tuple[Any, Any]] = []
    if isinstance(configured, dict):
        pairs += configured.items()
    elif isinstance(configured, list):
        for entry in configured:
            if isinstance(entry, dict):
                pairs.append((entry.get("name"), entry.get("template")))
    sources: dict[Any, Any] = dict(pairs)
    return {name: source for name, source in sources.items() if isinstance(name, str) and isinstance(source, str)}


def _decoded(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name} is no UTF-8: {error}") from None
