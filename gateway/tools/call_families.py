"""How families of models write calls of tools and their reasoning.

The family of a model is found by the markers in its chat template. Its texts serve twice: `grammar.py` makes a grammar
of them as they stand, and `reader.py` finds calls by them, with any white space between their words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

NAME = "NAME"
"""Placeholder of a tool's name in the texts of a Family."""
TOOL_NAME = "[a-zA-Z0-9_.:-]{1,128}"
"""Pattern of a tool's name. Those of Anthropic's API and of MCP are longer than OpenAI's 64 characters."""
MARKER = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")
"""Pattern of a text that may be one token of a vocabulary: `<tool_call>`, `[TOOL_CALLS]`."""
_PART = re.compile(rf"{MARKER.pattern}|[^\s<\[]+|\S")


@dataclass(frozen=True)
class CallFamily:
    """The texts with which a family of models writes calls.

    Calls are `opening`, a call, for each further one `between` and a call, and `closing`. A call is `head`, its
    arguments as a JSON object, and `tail`.
    """

    # Hermes: <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>
    #         opening       head                      arguments tail, closing

    name: str
    marker: str | None
    """Text that announces calls anywhere in an output; None = calls are found by their JSON alone. `opening` begins
    with it, unless the family is `bare`."""
    opening: str
    head: str
    tail: str
    between: str
    closing: str
    bare: bool = False
    """Whether an output that begins with JSON may be calls without a marker. One call alone then has no `opening`."""
    short_ids: bool = False
    """Whether the chat template takes only ids of nine letters and digits."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts around the arguments of calls."""
        return self.opening, self.head, self.tail, self.between, self.closing

    @property
    def is_object(self) -> bool:
        """Whether a call is one JSON object that holds the name and the arguments; else the name is in front of it."""
        return self.head.startswith("{")

    @cached_property
    def before(self) -> re.Pattern[str]:
        """Pattern of the text in front of the first JSON object of calls."""
        if self.bare:
            marker = ""
            if self.marker is not None:
                marker = f"(?:{re.escape(self.marker)})?"
            return re.compile(rf"\s*{marker}\s*\[?\s*")
        text = self.opening
        if not self.is_object:
            text += self.head
        return _any_space(text)

    @cached_property
    def amid(self) -> re.Pattern[str]:
        """Pattern of the text between the JSON objects of two calls."""
        if self.bare:
            return re.compile(r"\s*[,;]?\s*")
        if self.is_object:
            return _any_space(self.between)
        return _any_space(self.tail + self.between + self.head)

    @cached_property
    def after(self) -> re.Pattern[str]:
        """Pattern of the text behind the last JSON object of calls. It does not end with white space, so that a match
        is complete when it is found.
        """
        if self.bare:
            return re.compile(r"\s*\]")
        text = self.closing
        if not self.is_object:
            text = self.tail + text
        return re.compile(_any_space_pattern(text))


def _any_space(text: str) -> re.Pattern[str]:
    return re.compile(_any_space_pattern(text) + r"\s*")


def _any_space_pattern(text: str) -> str:
    # "<a>\nNAME" -> \s*<a>\s*(?P<name>...)
    pattern = ""
    for part in _PART.findall(text):
        pattern += rf"\s*{re.escape(part)}"
    return pattern.replace(NAME, f"(?P<name>{TOOL_NAME})")


_OBJECT = '{"name": "NAME", "arguments": '
_PARAMETERS = '{"name": "NAME", "parameters": '
_DEEPSEEK = "<｜tool▁calls▁begin｜>"
_CALL = "<｜tool▁call▁begin｜>"
_SEP = "<｜tool▁sep｜>"
_END = "<｜tool▁call▁end｜>"

HERMES = CallFamily(
    "hermes",
    "<tool_call>",
    "<tool_call>\n",
    _OBJECT,
    "}",
    "\n</tool_call>\n<tool_call>\n",
    "\n</tool_call>",
)
MISTRAL = CallFamily("mistral", "[TOOL_CALLS]", "[TOOL_CALLS][", _OBJECT, "}", ", ", "]", short_ids=True)
MISTRAL_SPACED = CallFamily("mistral", "[TOOL_CALLS]", "[TOOL_CALLS] [", _OBJECT, "}", ", ", "]", short_ids=True)
MISTRAL_ARGS = CallFamily(
    "mistral [ARGS]", "[TOOL_CALLS]", "[TOOL_CALLS]", "NAME[ARGS]", "", "[TOOL_CALLS]", "", short_ids=True
)
DEEPSEEK = CallFamily(
    "deepseek",
    _DEEPSEEK,
    _DEEPSEEK,
    f"{_CALL}function{_SEP}NAME\n```json\n",
    f"\n```{_END}",
    "\n",
    "<｜tool▁calls▁end｜>",
)
DEEPSEEK_V31 = CallFamily("deepseek v3.1", _DEEPSEEK, _DEEPSEEK, f"{_CALL}NAME{_SEP}", _END, "", "<｜tool▁calls▁end｜>")
LLAMA3 = CallFamily("llama3", "<|python_tag|>", "", _PARAMETERS, "}", "; ", "", bare=True)
JSON = CallFamily("json", None, "[", _OBJECT, "}", ", ", "]", bare=True)


def family_of(template: str) -> CallFamily:
    """Return the family of a chat template that takes tools: JSON for one without a known marker."""
    if _DEEPSEEK in template:
        if "```json" in template:
            return DEEPSEEK
        return DEEPSEEK_V31
    if "[ARGS]" in template and "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS
    if "[TOOL_CALLS] [" in template:
        return MISTRAL_SPACED
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" in template:
        return HERMES
    if "<|python_tag|>" in template or ('"parameters": ' in template and "<|start_header_id|>" in template):
        return LLAMA3
    return JSON


Marks = tuple[str, str]
"""The texts that begin and end the reasoning of an output."""


def reasoning_marks(template: str) -> Marks | None:
    """Return the marks of reasoning in a chat template, None for a template without."""
    for marks in (("<think>", "</think>"), ("[THINK]", "[/THINK]")):
        if marks[1] in template:
            return marks
    return None
