"""Writes docs/reports/tool-forms.md: what was found of each template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from gateway.tools.call_families import FAMILIES
from tests.tool_forms.chats import ANSWERS
from tests.tool_forms.oracle import CHECKS, Verdict
from tests.tool_forms.templates import KNOWN, TemplateFile
from tests.tool_forms.vllm_readings import Comparison

DOCUMENT = Path(__file__).parents[2] / "docs/reports/tool-forms.md"
HEAD = """# Calls of tools, tried on public chat templates

<!-- written by make tool-forms TEMPLATES=FOLDER -->

Each template wrote {num_answers} answers with calls: one call, two, text in front, no arguments, values of each type,
letters beyond ASCII, quotes, line breaks, text that looks like a tag, nested objects. What it wrote went through
Outrider:

- recognised: the family that the template shows is the row's.
- read: the whole text gives the same calls, with types by the tool's schema.
- streamed: so does the text in two pieces, cut at every place, and one character at a time.
- required, strict: the grammar of `tool_choice: "required"` and that of a strict tool accept the text, in tokens of
  one byte and in those of a trained vocabulary, and refuse a call with a wrong argument, and text in place of a call.
- history: the template takes the calls back, with a tool's result, from OpenAI's messages.
- template oracle: answers that were read, of those that the template writes.
- vLLM oracle: answers of which the parsers of vLLM 0.32.0 read these calls, whole and streamed.

`differs` means that the template writes past calls in another way than its models write new ones; the sentence stands
below.
"""


def differs(template: TemplateFile, check: str) -> bool:
    """Return whether a template is known not to pass a check."""
    return template.name in KNOWN and check in KNOWN[template.name][0]


def unexpected(template: TemplateFile, verdict: Verdict) -> list[str]:
    """Return the failures of a template that are not known, a line each."""
    lines = []
    for check, whys in verdict.failures.items():
        if not differs(template, check):
            lines += [f"{template.name}, {check}: {why}" for why in whys]
    return lines


def document(
    verdicts: Sequence[tuple[TemplateFile, Verdict]],
    comparisons: Mapping[str, Comparison],
    explanations: Sequence[str],
    others: Sequence[str],
) -> str:
    """Return the document.

    `comparisons`: what vLLM read, by the template's name. `explanations`: sentences about where it differs. `others`:
    sentences about templates of no family.
    """
    columns = ["family", "template", *CHECKS, "template oracle", "vLLM oracle"]
    lines = [HEAD.format(num_answers=len(ANSWERS)), f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for family in FAMILIES:
        own = [each for each in verdicts if each[0].family == family.name]
        for template, verdict in own:
            lines.append(_row(template, verdict, comparisons))
        if not own:
            lines.append(f"| `{family.name}` | no public template was to be had |" + " |" * (len(columns) - 2))
    lines += ["", "## Where a template differs", ""]
    names = [template.name for template, _ in verdicts]
    lines += [f"- {name}: {why}" for name, (_, why) in KNOWN.items() if name in names]
    if comparisons:
        lines += ["", "## Where vLLM differs", ""]
        lines += [f"- {sentence}" for sentence in explanations]
    lines += ["", "## Templates of no family", "", *(f"- {sentence}" for sentence in others)]
    lines += [
        "",
        "## Where the templates come from",
        "",
        "| template | repository and path | sha256 |",
        "|---|---|---|",
    ]
    lines += [f"| {template.name} | {template.origin} | `{template.sha256}` |" for template, _ in verdicts]
    return "\n".join(lines) + "\n"


def _row(template: TemplateFile, verdict: Verdict, comparisons: Mapping[str, Comparison]) -> str:
    words = []
    for check in CHECKS:
        word = verdict.told(check)
        if word == "no" and differs(template, check):
            word = "differs"
        words.append(word)
    oracle = f"{verdict.num_read} of {len(verdict.texts)}"
    if not verdict.texts:
        words[1:] = ["-"] * (len(CHECKS) - 1)
        oracle = "writes no calls"
    vllm = "not run"
    if template.name in comparisons:
        vllm = comparisons[template.name].told()
    return f"| `{template.family}` | {template.name} | {' | '.join(words)} | {oracle} | {vllm} |"
