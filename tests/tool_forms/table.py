"""Writes docs/reports/tool-forms.md: what was found of each template."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from gateway.tools.call_families import FAMILIES
from tests.tool_forms.chats import ANSWERS
from tests.tool_forms.oracle import CHECKS, Verdict
from tests.tool_forms.templates import KNOWN, Difference, TemplateFile
from tests.tool_forms.vllm_readings import Comparison

DOCUMENT = Path(__file__).parents[2] / "docs/reports/tool-forms.md"
HEAD = """# Calls of tools, tried on public chat templates

<!-- written by make tool-forms TEMPLATES=FOLDER -->

Each template wrote {num_answers} answers with calls: one call, two, text in front, no arguments, values of each type,
letters beyond ASCII, quotes, line breaks, text that looks like a tag, nested objects. What it wrote went through
Outrider:

- recognised: the family that the template shows is the row's.
- written: the template writes the answer's calls.
- read: the whole text gives the same calls, with types by the tool's schema, and the text in front of them.
- streamed: so does the text in two pieces, cut at every place, and one character at a time.
- required: the grammar of `tool_choice: "required"` accepts what the template writes, and one call as the family writes
  it. It refuses a text without a call. It is not tried with the answer that has text in front.
- strict: the grammar of a strict tool accepts one call, as the template and as the family write it. It refuses an
  argument of a wrong type, as both write it. It is tried with no other answer: their tool has parameters that may be
  absent, which a strict tool has not.
- Both grammars are tried with tokens of one byte and with those of a trained vocabulary. With the latter, the answer
  with text that looks like a tag is left out: a tokenizer makes a token of it.
- An argument of a wrong type is tried as the template writes it only where a right one is read as a call. Where the
  template writes tags that are skipped in front of calls, it is tried with the trained vocabulary alone, which has
  tokens for them.
- history: the template takes the calls back, with a tool's result, from OpenAI's messages.
- template oracle: answers that were read, of those that the template writes.
- vLLM oracle: answers of which the parsers of vLLM 0.32.0 read these calls, whole and streamed.

`differs` means that the template writes past calls in another way than its models write new ones, for some of the
answers; the sentence below says for which. A grammar that accepts a wrong text is never known: it fails.
"""


def differences(template: TemplateFile) -> list[Difference]:
    """Return what is known of a template."""
    return [known for known in KNOWN if template.name in known.names]


def is_known(template: TemplateFile, check: str, answer: str) -> bool:
    """Return whether a template is known not to pass a check with an answer.

    Only an answer of chats.ANSWERS may be known: a grammar that accepts a wrong text is never right.
    """
    return answer in ANSWERS and any(answer in known.answers.get(check, ()) for known in differences(template))


def unexpected(template: TemplateFile, verdict: Verdict) -> list[str]:
    """Return the failures of a template that are not known, a line each."""
    lines = []
    for (check, answer), whys in verdict.failures.items():
        if not is_known(template, check, answer):
            lines += [f"{template.name}, {check}, {answer}: {why}" for why in whys]
    return lines


def needless(verdicts: Sequence[tuple[TemplateFile, Verdict]]) -> list[str]:
    """Return a line for each check and answer that a template is known not to pass, and that it passes."""
    lines = []
    for template, verdict in verdicts:
        for known in differences(template):
            for check, answers in known.answers.items():
                for answer in answers:
                    if (check, answer) not in verdict.failures:
                        lines.append(f"{template.name}, {check}, {answer}: it passes, and KNOWN says that it does not")
    return lines


def document(
    verdicts: Sequence[tuple[TemplateFile, Verdict]],
    comparisons: Mapping[str, Comparison],
    explanations: Sequence[str],
    others: Sequence[str],
) -> str:
    """Return the document.

    `comparisons`: what vLLM read, by the template's name. `explanations`: sentences about where it differs. `others`:
    sentences about templates that are not in the table.
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
    for template, verdict in verdicts:
        lines += _sentences(template, verdict)
    if comparisons:
        lines += ["", "## Where vLLM differs", ""]
        lines += [f"- {sentence}" for sentence in explanations]
    lines += ["", "## Templates that are not in the table", "", *(f"- {sentence}" for sentence in others)]
    lines += [
        "",
        "## Where the templates come from",
        "",
        "| template | repository and path | sha256 |",
        "|---|---|---|",
    ]
    lines += [f"| {template.name} | {template.origin} | `{template.sha256}` |" for template, _ in verdicts]
    return "\n".join(lines) + "\n"


def _sentences(template: TemplateFile, verdict: Verdict) -> list[str]:
    """Return a line for each thing that is known of a template, with the checks and answers that need it."""
    lines = []
    for known in differences(template):
        places = []
        for check, answers in known.answers.items():
            needing = [answer for answer in answers if (check, answer) in verdict.failures]
            if needing:
                words = ", ".join(needing)
                if len(needing) == len(ANSWERS):
                    words = "all"
                places.append(f"{check}: {words}")
        if places:
            lines.append(f"- {template.name} ({'; '.join(places)}): {known.why}")
    return lines


def _row(template: TemplateFile, verdict: Verdict, comparisons: Mapping[str, Comparison]) -> str:
    words = []
    for check in CHECKS:
        word = verdict.told(check)
        failed = [answer for name, answer in verdict.failures if name == check]
        if failed and all(is_known(template, check, answer) for answer in failed):
            word = "differs"
        words.append(word)
    oracle = "writes no calls"
    if verdict.texts:
        oracle = f"{len(verdict.read)} of {len(verdict.texts)}"
    vllm = "not run"
    if template.name in comparisons:
        vllm = comparisons[template.name].told()
    return f"| `{template.family}` | {template.name} | {' | '.join(words)} | {oracle} | {vllm} |"
