"""Finds how a model writes its calls and its reasoning: by its chat template, or by the gateway's settings."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from gateway.tokenizer import Tokenizer
from gateway.tools.call_families import BY_PARSER, CallFamily, UnknownFamily, family_of
from gateway.tools.reasoning import REASONING_BY_PARSER, ReasoningFamily, reasoning_family
from outrider.wire.errors import ConfigError

AUTO = "auto"
"""Value of `--tool-call-parser` and `--reasoning-parser` with which the chat template decides on the family."""


def check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raise ConfigError if one of the two settings is neither AUTO nor the name of a family."""
    for setting, name, known in (
        ("tool_call_parser", tool_call_parser, BY_PARSER),
        ("reasoning_parser", reasoning_parser, REASONING_BY_PARSER),
    ):
        if name != AUTO and name not in known:
            names = ", ".join(sorted(known))
            raise ConfigError(f"{setting} is {name!r}, must be {AUTO} or one of {names}", param=setting)


@dataclass(frozen=True, slots=True)
class Families:
    """How a model writes its calls and its reasoning."""

    calls: CallFamily | None
    """How the model writes calls. None = its chat template takes no tools, or writes calls in an unknown form."""
    reasoning: ReasoningFamily | None
    """How the model writes reasoning. None = its chat template shows no reasoning."""
    unknown_tag: str = ""
    """Tag with which the chat template writes calls, if it writes them in an unknown form; else empty."""

    def describe(self) -> str:
        """Return a sentence for the log that says in which form calls and reasoning are read."""
        calls = "not read: the chat template takes no tools"
        if self.calls is not None:
            calls = f"read in the form {self.calls.name}"
        elif self.unknown_tag:
            calls = f"not read: the chat template writes them with {self.unknown_tag}, a form of no known family"
        if self.reasoning is None:
            return f"tool calls are {calls}; no reasoning is split off"
        return f"tool calls are {calls}; reasoning in the form {self.reasoning.name}"


def families_of(tokenizer: Tokenizer, source: str) -> Families:
    """Return how a model writes calls and reasoning: as the tokenizer's `tool_call_parser` and `reasoning_parser` say,
    or, where one of them is `auto`, as the chat template shows.

    `source`: the text of the chat template with which the prompt is written.
    """
    accepts_tools = tokenizer.template is not None and tokenizer.template.accepts_tools
    return _families_of(source, accepts_tools, tokenizer.tool_call_parser, tokenizer.reasoning_parser)


def families_shown(source: str, *, accepts_tools: bool) -> Families:
    """Return how a model writes calls and reasoning, by its chat template alone and not by the gateway's settings.

    `source`: the text of the template. `accepts_tools`: whether the template writes the tools of a request.
    """
    return _families_of(source, accepts_tools, AUTO, AUTO)


@lru_cache(maxsize=256)
def _families_of(source: str, accepts_tools: bool, tool_call_parser: str, reasoning_parser: str) -> Families:
    reasoning = REASONING_BY_PARSER.get(reasoning_parser) or reasoning_family(source)
    if tool_call_parser != AUTO:
        return Families(BY_PARSER[tool_call_parser], reasoning)
    if not accepts_tools:
        return Families(None, reasoning)
    try:
        return Families(family_of(source), reasoning)
    except UnknownFamily as error:
        return Families(None, reasoning, str(error))
