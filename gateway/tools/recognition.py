"""Which families a model is of: by its chat template, or as the gateway's settings name them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from gateway.tokenizer import Tokenizer
from gateway.tools.call_families import BY_PARSER, CallFamily, UnknownFamily, family_of
from gateway.tools.reasoning import REASONING_BY_PARSER, ReasoningFamily, reasoning_family
from outrider.wire.errors import ConfigError

AUTO = "auto"
"""Name of a parser that leaves the choice to the chat template."""


def check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    """Raise ConfigError for a parser that no family has as its name."""
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
    """None = in a form that no family has, or the chat template takes no tools."""
    reasoning: ReasoningFamily | None
    """None = it has none."""
    unknown_tag: str = ""
    """The tag in the template that shows calls of an unknown form; empty = there is none."""

    def describe(self) -> str:
        """Return a sentence for the log."""
        calls = "not read: the chat template takes no tools"
        if self.calls is not None:
            calls = f"read in the form {self.calls.name}"
        elif self.unknown_tag:
            calls = f"not read: the chat template writes them with {self.unknown_tag}, a form of no known family"
        if self.reasoning is None:
            return f"tool calls are {calls}; no reasoning is split off"
        return f"tool calls are {calls}; reasoning in the form {self.reasoning.name}"


def families_of(tokenizer: Tokenizer, source: str) -> Families:
    """Return how a model writes calls and reasoning. `source`: of the chat template of its prompts."""
    accepts_tools = tokenizer.template is not None and tokenizer.template.accepts_tools
    return _families_of(source, accepts_tools, tokenizer.tool_call_parser, tokenizer.reasoning_parser)


def families_shown(source: str, *, accepts_tools: bool) -> Families:
    """Return how a model with this chat template writes calls and reasoning, by the template alone."""
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
