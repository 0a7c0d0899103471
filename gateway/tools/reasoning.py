"""Finds where the reasoning of an output begins and ends, by its text, whatever its tokens. No I/O.

The reader of calls, the stops that wait for the answer, and the grammar of the answer depend on the same place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

Marks = tuple[str, str]
"""The two texts that begin and end the reasoning of an output: `("<think>", "</think>")`."""


@dataclass(frozen=True)
class ReasoningFamily:
    """How a family of models writes its reasoning.

    # harmony: <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.
    # marks: <|channel|>analysis<|message|> and <|end|>. turn: <|start|>assistant.
    # answer_start: <|channel|>final<|message|>.
    """

    name: str
    marks: Marks
    silent: tuple[str, ...] = ()
    """Texts outside reasoning and calls that are dropped from an output, such as `<answer>` and `</answer>`."""
    answer_start: str = ""
    """Text in front of an answer that is not a call, such as `<|channel|>final<|message|>`. A grammar of the whole
    output requires it. Empty = the model writes no such text."""
    turn: str = ""
    """Text between the reasoning and the answer or call that follows: the beginning of the model's next message, such
    as `<|start|>assistant`. Empty = at most white space stands there."""
    may_return: bool = False
    """Whether an output may have more reasoning behind content or calls."""
    in_template: tuple[str, ...] = ()
    """Texts by which a chat template is recognised: its source contains all of them. Empty = it is recognised by the
    text that ends the reasoning."""
    parsers: tuple[str, ...] = ()
    """Other values of `--reasoning-parser` that select this family, besides `name`: vLLM's names."""

    def shows_in(self, template: str) -> bool:
        """Return whether this chat template is one of the family. `template`: its source."""
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
"""All families of reasoning. A chat template belongs to the first one whose texts it contains."""
REASONING_BY_PARSER: Mapping[str, ReasoningFamily] = {
    name: family for family in REASONING_FAMILIES for name in (family.name, *family.parsers)
}
"""Family of reasoning by the value of `--reasoning-parser` that selects it."""


def reasoning_family(template: str) -> ReasoningFamily | None:
    """Return how models with this chat template write reasoning; None if it shows none. `template`: its source."""
    for family in REASONING_FAMILIES:
        if family.shows_in(template):
            return family
    return None


MAX_SPACE_CHARS = 256
"""Number of characters at the start of an output in which the text that begins reasoning has to stand. Only white space
may precede it."""


def begins_reasoning(text: str, mark: str, *, final: bool = False) -> bool | None:
    """Return whether an output begins with reasoning. None if that depends on text that has not come.

    `text`: the output so far. `mark`: the text that begins reasoning; the output may have white space in front of it.
    `final`: whether the output has ended.
    """
    # mark "<think>": True for " <think>a", None for "<th", False for "a"
    begin = text[:MAX_SPACE_CHARS].lstrip()
    if begin.startswith(mark):
        return True
    if not final and mark.startswith(begin) and len(text) < MAX_SPACE_CHARS:
        return None
    return False


class AnswerFinder:
    """Finds the answer in the growing text of an output: the text behind the reasoning, or the whole text if there is
    no reasoning. White space between reasoning and answer belongs to neither.
    """

    def __init__(self, marks: Marks | None, in_reasoning: bool) -> None:
        """`marks`: None = there is no reasoning. `in_reasoning`: whether the prompt ends inside the reasoning."""
        self._marks = marks
        self._is_reasoning = in_reasoning
        """Whether the text has reasoning, ended or not."""
        self.is_behind = marks is None
        """Whether the reasoning has ended, or the output is known to have none."""
        self._pending = ""
        """End of the text, which may be a part of a mark."""
        self.is_found = marks is None
        """Whether the answer has begun. Always True if `marks` is None."""

    @property
    def num_undecided_chars(self) -> int:
        """Number of characters of which it is not known yet whether they are reasoning or answer."""
        if self.is_found or self._is_reasoning:
            return 0
        return len(self._pending)

    def push(self, text: str) -> str:
        """Append `text` to the output. Return the characters that are certain to be answer now and were not before."""
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
        """Return the text that was undecided: it is answer, since the output has ended. Call this once, at the end."""
        if self.is_found or self._is_reasoning:
            return ""
        return self._found(self._pending)

    def _found(self, answer: str) -> str:
        self.is_behind = True
        self.is_found = answer != ""
        self._pending = ""
        return answer
