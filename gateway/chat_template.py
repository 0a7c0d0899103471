"""A model's chat template as the gateway holds it: read from the model's files, rendered in the pool of renderers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.confined.pool import ConfinedPool, NestsTooDeep, WorkExceeded, WorkFailed, WorkRefused
from outrider.wire.errors import ConfigError, InvalidRequest, OutriderError, Overloaded
from outrider.wire.log import get_logger
from outrider.wire.settings.config import GatewayConfig

log = get_logger(__name__)

Message = dict[str, Any]
"""At least `role`, and `content`, text; None beside `tool_calls`, whose arguments are objects."""

MAX_SOURCE_CHARS = 1 << 20
"""Characters of a template, which goes to a renderer with each chat. The largest known one has 40,000."""
_REMEDY = "give the gateway another template: --chat-template FILE"


class Renderers(Protocol):
    """Runs the work of `gateway.confined.templates`: a ConfinedPool."""

    async def run(self, caller: bytes, request: Any) -> Any: ...


def create_renderers(config: GatewayConfig) -> ConfinedPool:
    """Return the pool in which all chat templates are rendered."""
    name = "the rendering of a chat template"
    return ConfinedPool("gateway.confined.templates", config.max_compile_s, name=name)


class TextTooLong(Exception):
    """A rendered text has more characters than were allowed."""


@dataclass(frozen=True, slots=True)
class TemplateFile:
    """The source of a template and where it stands."""

    name: str
    """For errors."""
    source: str
    tool_source: str | None = None
    """The template that is taken where there are tools; None = the same."""


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A template that a renderer has compiled."""

    name: str
    """Names the file or setting that the source is from, for errors."""
    source: str
    tool_source: str
    special_tokens: dict[str, str]
    takes_tools: bool
    marks_turns: bool
    """Whether it marks who speaks; false where it writes the messages' text alone, for a model that continues text."""
    renderers: Renderers

    @classmethod
    async def compiled(cls, file: TemplateFile, special_tokens: dict[str, str], renderers: Renderers) -> ChatTemplate:
        """Return the template. Raise ConfigError, naming the file, when it cannot be compiled within the limits."""
        tool_source = file.source if file.tool_source is None else file.tool_source
        for source in (file.source, tool_source):
            if len(source) > MAX_SOURCE_CHARS:
                raise ConfigError(
                    f"{file.name} has {len(source)} characters, at most {MAX_SOURCE_CHARS} are allowed; {_REMEDY}"
                )
        try:
            plain, checked = await renderers.run(b"", {"kind": "check", "sources": [file.source, tool_source]})
        except WorkRefused as error:
            raise ConfigError(f"{file.name} {error.message}; {_REMEDY}") from None
        except WorkExceeded as error:
            raise ConfigError(f"{file.name} takes more than {error} to compile; {_REMEDY}") from None
        except Overloaded as error:
            raise WorkFailed(error.message) from None  # says nothing of the template: it is read again
        return cls(
            file.name, file.source, tool_source, special_tokens, checked["takes_tools"], plain["marks_turns"], renderers
        )

    async def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        extra: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        max_chars: int,
        caller: bytes = b"",
    ) -> str:
        """Return the messages as one text.

        caller: on whose share of the renderers. Raise InvalidRequest with the template's own words when it refuses the
        messages, and in ours when it takes too much; TextTooLong for a text of more than `max_chars` characters.
        """
        names: dict[str, Any] = {**self.special_tokens, "messages": [self._known(message) for message in messages]}
        names |= {"tools": list(tools) or None, "documents": None, "add_generation_prompt": add_generation_prompt}
        if clash := sorted(names.keys() & extra.keys()):
            raise InvalidRequest(f"chat_template_kwargs may not set {clash[0]}", param="chat_template_kwargs")
        source = self.tool_source if tools else self.source
        request = {"kind": "render", "source": source, "names": {**names, **extra}, "max_chars": max_chars}
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

    def _known(self, message: Message) -> Message:
        """Call the developer role by its older name, system, where the template does not know it."""
        if message["role"] == "developer" and "developer" not in self.source:
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
        named = [entry for entry in configured if isinstance(entry, dict) and entry.get("name") == name]
        configured = named[-1].get("template") if named else None
    return configured if isinstance(configured, str) else None


def template_of_files(file: bytes, configured: Any, override: str | None) -> TemplateFile | None:
    """Return the template of a model, None for one without. Raise ConfigError for a file that is no UTF-8.

    file: chat_template.jinja. configured: see `find_template`. override: the operator's template.
    """
    if override is not None:
        return TemplateFile("the file of --chat-template", override)
    try:
        text = file.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"chat_template.jinja is no UTF-8: {error}") from None
    source = find_template(text, configured)
    if source is None:
        return None
    name = "chat_template.jinja" if text else "chat_template of tokenizer_config.json"
    return TemplateFile(name, source, find_template(text, configured, "tool_use"))
