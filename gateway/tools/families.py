"""How families of models write calls of tools and their reasoning. Found by the markers in a chat template's text.

One description serves both ways: a grammar is made of the texts as they stand, and a reader forgives their white space.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

NAME = "NAME"
"""Stands for a tool's name in the texts below."""
TOOL_NAME = "[a-zA-Z0-9_.:-]{1,128}"
"""Names as Anthropic's API and MCP have them, which are longer than OpenAI's 64 characters."""
MARKER = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
"""What may be one token of a vocabulary."""
_PART = re.compile(rf"{MARKER.pattern}|[^\s<\[]+|\S")


@dataclass(frozen=True)
class Family:
    """Calls are `opening`, one call, further ones each after `between`, and `closing`. A call is `head`, its arguments
    as a JSON object, and `tail`.
    """

    name: str
    marker: str | None
    """Announces calls anywhere in an answer; `opening` begins with it, unless the family is `bare`."""
    opening: str
    head: str
    tail: str
    between: str
    closing: str
    bare: bool = False
    """An answer that begins with JSON may be calls without a marker; then one call alone has no `opening`."""
    short_ids: bool = False
    """The template takes ids of nine letters and digits alone."""

    @property
    def texts(self) -> tuple[str, ...]:
        return self.opening, self.head, self.tail, self.between, self.closing

    @property
    def is_object(self) -> bool:
        """Whether a call is one JSON object that holds the name and the arguments."""
        return self.head.startswith("{")

    @cached_property
    def before(self) -> re.Pattern[str]:
        """What stands before the first JSON object of calls."""
        if self.bare:
            marker = "" if self.marker is None else f"(?:{re.escape(self.marker)})?"
            return re.compile(rf"\s*{marker}\s*\[?\s*")
        return _forgiving(self.opening if self.is_object else self.opening + self.head)

    @cached_property
    def amid(self) -> re.Pattern[str]:
        """What stands between two JSON objects."""
        if self.bare:
            return re.compile(r"\s*[,;]?\s*")
        return _forgiving(self.between if self.is_object else self.tail + self.between + self.head)

    @cached_property
    def after(self) -> re.Pattern[str]:
        """What follows the last JSON object. No white space ends it, so that it is known when it is there."""
        if self.bare:
            return re.compile(r"\s*\]")
        return _forgiving(self.closing if self.is_object else self.tail + self.closing, open_ended=False)


def _forgiving(text: str, open_ended: bool = True) -> re.Pattern[str]:
    parts = [re.escape(part) for part in _PART.findall(text)]
    joined = "".join(rf"\s*{part}" for part in parts)
    joined = joined.replace(NAME, f"(?P<name>{TOOL_NAME})")
    return re.compile(joined + r"\s*" if open_ended else joined)


_OBJECT, _PARAMETERS = '{"name": "NAME", "arguments": ', '{"name": "NAME", "parameters": '
_DEEPSEEK = "<｜tool▁calls▁begin｜>"
_CALL, _SEP, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

HERMES = Family(
    "hermes",
    "<tool_call>",
    "<tool_call>\n",
    _OBJECT,
    "}",
    "\n</tool_call>\n<tool_call>\n",
    "\n</tool_call>",
)
MISTRAL = Family("mistral", "[TOOL_CALLS]", "[TOOL_CALLS][", _OBJECT, "}", ", ", "]", short_ids=True)
MISTRAL_SPACED = Family("mistral", "[TOOL_CALLS]", "[TOOL_CALLS] [", _OBJECT, "}", ", ", "]", short_ids=True)
MISTRAL_ARGS = Family(
    "mistral [ARGS]", "[TOOL_CALLS]", "[TOOL_CALLS]", "NAME[ARGS]", "", "[TOOL_CALLS]", "", short_ids=True
)
DEEPSEEK = Family(
    "deepseek",
    _DEEPSEEK,
    _DEEPSEEK,
    f"{_CALL}function{_SEP}NAME\n```json\n",
    f"\n```{_END}",
    "\n",
    "<｜tool▁calls▁end｜>",
)
DEEPSEEK_V31 = Family("deepseek v3.1", _DEEPSEEK, _DEEPSEEK, f"{_CALL}NAME{_SEP}", _END, "", "<｜tool▁calls▁end｜>")
LLAMA3 = Family("llama3", "<|python_tag|>", "", _PARAMETERS, "}", "; ", "", bare=True)
JSON = Family("json", None, "[", _OBJECT, "}", ", ", "]", bare=True)


def family_of(template: str) -> Family:
    """Return the family of a chat template that takes tools, generic JSON where it shows no marker."""
    if _DEEPSEEK in template:
        return DEEPSEEK if "```json" in template else DEEPSEEK_V31
    if "[TOOL_CALLS]" in template:
        spaced = MISTRAL_SPACED if "[TOOL_CALLS] [" in template else MISTRAL
        return MISTRAL_ARGS if "[ARGS]" in template else spaced
    if "<tool_call>" in template:
        return HERMES
    if "<|python_tag|>" in template or ('"parameters": ' in template and "<|start_header_id|>" in template):
        return LLAMA3
    return JSON


Marks = tuple[str, str]
"""What begins and what ends the reasoning."""


def reasoning_marks(template: str) -> Marks | None:
    """Return the marks that a chat template has, None for one without."""
    for marks in (("<think>", "</think>"), ("[THINK]", "[/THINK]")):
        if marks[1] in template:
            return marks
    return None
