"""Finds where the reasoning of an output begins and ends, by its text, whatever its tokens. No I/O.

The reader of calls, the stops that wait for the answer, and the grammar of the answer depend on the same place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Marks = tuple[str, str]
"""The texts that begin and end the reasoning of an output."""


@dataclass(frozen=True)
class ReasoningFamily:
    """How a family of models writes its reasoning."""

    name: str
    marks: Marks
    silent: tuple[str, ...] = ()
    """Texts outside the reasoning and calls that are no part of the answer, such as tags around it."""
    answer_start: str = ""
    """Text that a model of the family writes in front of an answer that is no call. A grammar of answers has it."""
    turn: str = ""
    """Text that a model of the family writes between its reasoning and what follows; empty = white space at most."""
    may_return: bool = False
    """Whether reasoning may follow an answer."""
    in_template: tuple[str, ...] = ()
    """Texts by which a chat template shows the family; none: `marks`' end."""
    parsers: tuple[str, ...] = ()
    """Names of the family for `--reasoning-parser`, besides its own: those of vLLM."""

    def shows_in(self, template: str) -> bool:
        """Return whether a chat template shows this family."""
        return all(text in template for text in self.in_template or (self.marks[1],))


HARMONY = ReasoningFamily(
    "openai_gptoss",
    ("<|channel|>analysis<|message|>", "<|end|>"),
    silent=(
        "<|start|>assistant",
        "<|channel|>final <|constrain|>json<|message|>",
        "<|channel|>final<|message|>",
        "<|channel|>commentary<|message|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
    ),
    answer_start="<|channel|>final<|message|>",
    turn="<|start|>assistant",
    may_return=True,
    in_template=("<|channel|>", "<|message|>"),
    parsers=("openai", "gptoss", "gpt_oss", "harmony"),
)
COHERE = ReasoningFamily(
    "cohere_command",
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    silent=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    parsers=("cohere", "cohere_command3", "cohere_command4"),
)
HUNYUAN = ReasoningFamily(
    "hunyuan_a13b", ("<think>", "</think>"), silent=("<answer>", "</answer>"), in_template=("</think>", "<answer>")
)
ERNIE = ReasoningFamily(
    "ernie45", ("<think>", "</think>"), silent=("<response>", "</response>"), in_template=("</think>", "<response>")
)
GEMMA4 = ReasoningFamily("gemma4", ("<|channel>thought\n", "<channel|>"))
SEED_OSS = ReasoningFamily("seed_oss", ("<seed:think>", "</seed:think>"))
MISTRAL = ReasoningFamily("mistral", ("[THINK]", "[/THINK]"))
KIMI = ReasoningFamily("kimi_vl", ("◁think▷", "◁/think▷"))
APERTUS = ReasoningFamily("apertus", ("<|inner_prefix|>", "<|inner_suffix|>"))
HY3 = ReasoningFamily(
    "hy_v3", ("<think:opensource>", "</think:opensource>"), in_template=("</think{}>", "':opensource'")
)
GRANITE = ReasoningFamily(
    "granite",
    ("Here is my thought process:", "Here is my response:"),
    in_template=("Here is my thought process:", "Here is my response:"),
)
MINIMAX_M2 = ReasoningFamily("minimax_m2", ("<think>", "</think>"), in_template=("</think>", "minimax:tool_call"))
THINK = ReasoningFamily(
    "think",
    ("<think>", "</think>"),
    parsers=(
        *("qwen3", "deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "step3", "step3p5", "olmo3"),
        *("nemotron", "nemotron_v3", "holo2", "exaone4", "lfm2", "smollm3"),
        *("glm47", "deepseek_v4"),
    ),
)
REASONING_FAMILIES: Sequence[ReasoningFamily] = (
    HARMONY,
    COHERE,
    HUNYUAN,
    MINIMAX_M2,
    ERNIE,
    GEMMA4,
    SEED_OSS,
    MISTRAL,
    KIMI,
    APERTUS,
    HY3,
    THINK,
    GRANITE,
)
"""In the order in which a template is tried."""


def _by_parser() -> dict[str, ReasoningFamily]:
    found = dict[str, ReasoningFamily]()
    for family in REASONING_FAMILIES:
        for name in (family.name, *family.parsers):
            found[name] = family
    return found


REASONING_BY_PARSER: Mapping[str, ReasoningFamily] = _by_parser()
"""Families by the names that `--reasoning-parser` takes."""


def reasoning_family(template: str) -> ReasoningFamily | None:
    """Return the family of reasoning in a chat template, None for a template without."""
    for family in REASONING_FAMILIES:
        if family.shows_in(template):
            return family
    return None


MAX_SPACE_CHARS = 256
"""Characters at the start of an output within which its reasoning has to begin."""


def begins_reasoning(text: str, mark: str, *, final: bool = False) -> bool | None:
    """Return whether the output that starts with `text` begins with reasoning; None if more text may decide that.

    `mark`: the text that begins reasoning, with any white space in front. `final`: whether `text` is the whole output.
    """
    # mark "<think>": True for " <think>a", None for "<th", False for "a"
    begin = text[:MAX_SPACE_CHARS].lstrip()
    if begin.startswith(mark):
        return True
    if not final and mark.startswith(begin) and len(text) < MAX_SPACE_CHARS:
        return None
    return False


class AnswerFinder:
    """Finds the answer in the growing text of an output: the text behind the reasoning, or all of a text without
    reasoning. White space between the two belongs to neither.
    """

    def __init__(self, marks: Marks | None, in_reasoning: bool) -> None:
        """`marks`: None = there is no reasoning. `in_reasoning`: whether the prompt ends inside the reasoning."""
        self._marks = marks
        self._is_reasoning = in_reasoning
        """Whether the text has reasoning, ended or not."""
        self.is_behind = marks is None
        """Whether the text so far ends behind the reasoning."""
        self._pending = ""
        """End of the text, which may be a part of a mark."""
        self.is_found = marks is None
        """Whether the text so far has a part of the answer."""

    @property
    def num_undecided_chars(self) -> int:
        """Characters at the end of the text of which it is open whether they are reasoning or answer."""
        if self.is_found or self._is_reasoning:
            return 0
        return len(self._pending)

    def push(self, text: str) -> str:
        """Append `text` to the output. Return the characters that are now known to be of the answer."""
        if self._marks is None or self.is_found:
            return text
        if self.is_behind:
            return self._found(text.lstrip())
        begin, end = self._marks
        self._pending += text
        if not self._is_reasoning:
            begins = begins_reasoning(self._pending, begin)
            if begins is None:
                return ""
            if not begins:
                return self._found(self._pending)
            self._is_reasoning = True
            self._pending = self._pending.lstrip().removeprefix(begin)
        _, mark, answer = self._pending.partition(end)
        if mark:
            return self._found(answer.lstrip())
        self._pending = self._pending[-(len(end) - 1) :]
        return ""

    def finish(self) -> str:
        """Return the undecided text, which belongs to the answer if nothing follows it. Call it at the output's end."""
        if self.is_found or self._is_reasoning:
            return ""
        return self._found(self._pending)

    def _found(self, answer: str) -> str:
        self.is_behind = True
        self.is_found = answer != ""
        self._pending = ""
        return answer
