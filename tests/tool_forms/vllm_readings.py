"""Reads the same texts with vLLM's parsers, in vLLM's own environment, and compares."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gateway.tools.call_families import BY_PARSER
from gateway.tools.cursor import MARKER
from tests.tool_forms.chats import ANSWERS, TOOLS
from tests.tool_forms.disagreements import DISAGREEMENTS, Disagreement, explanation
from tests.tool_forms.oracle import Verdict
from tests.tool_forms.templates import TemplateFile

PROGRAM = Path(__file__).with_name("vllm_oracle.py")
PARSERS: Mapping[str, str | None] = {
    "json": "xlam",
    "mistral_args": "mistral",
    "mistral_call_id": "mistral",
    "mistral_spaced": "mistral",
    "cohere_command": "cohere_command3",
    "minimax": None,
    "nemotron_json": None,
    "phi4": None,
    "StepFun3.5-Flash": "step3p5",
    "inclusionai-ling-3.0-flash": "ling3",
    "poolside-Laguna-XS-2.1": "poolside_v1",
    "poolside-Laguna-XS.2": "poolside_v1",
    "poolside-Laguna-S-2.1": "poolside_v1",
    "ibm-granite-granite-4.0": "granite4",
    "ibm-granite-granite-4.1": "granite4",
}
"""Names of vLLM's parsers for templates and families that vLLM calls otherwise. None = it has none that reads them."""
_MORE_TOKENS = {"llama4_json": ("<|python_tag|>",)}
"""Tokens that a family's models do not have, and that vLLM's parser of it asks for."""
_TOKENIZER_SETTINGS = {"hy_v3": {"token_suffix": ":opensource"}}
"""Settings of a family's tokenizer that vLLM's parser of it reads."""
WAYS = ("whole", "streamed")


@dataclass
class Comparison:
    """What vLLM's parser read of a template's answers."""

    parser: str | None
    """Name of vLLM's parser. None = it has none."""
    num_cases: int = 0
    differences: dict[str, str] = field(default_factory=dict)
    """What vLLM read in place of the template's calls, by the name of the answer."""

    def told(self) -> str:
        """Return the table's word."""
        if not self.num_cases:
            return "writes no calls"
        if self.parser is None:
            return "has no parser"
        return f"{self.num_cases - len(self.differences)} of {self.num_cases}"


def compare(python: str, verdicts: Sequence[tuple[TemplateFile, Verdict]]) -> dict[str, Comparison]:
    """Return what vLLM's parsers make of the answers of each template, by its name.

    `python`: of an environment with vLLM.
    """
    cases = []
    found = dict[str, Comparison]()
    for template, verdict in verdicts:
        parser = PARSERS.get(template.name, PARSERS.get(template.family, template.family))
        found[template.name] = Comparison(parser, len(verdict.texts))
        if parser is None:
            continue
        for name, text in verdict.texts.items():
            cases.append(
                {
                    "id": _id(template, name),
                    "parser": parser,
                    "text": text,
                    "tools": [tool.for_template() for tool in TOOLS],
                    "vocabulary": _vocabulary(template.family),
                    "tokenizer_settings": _TOKENIZER_SETTINGS.get(template.family, {}),
                }
            )
    made = subprocess.run(
        [python, PROGRAM], input=json.dumps({"cases": cases}), stdout=subprocess.PIPE, text=True, check=True
    )
    results = {result["id"]: result for result in json.loads(made.stdout)["results"]}
    for template, verdict in verdicts:
        for name in verdict.texts:
            result = results.get(_id(template, name))
            if result is not None:
                difference = _difference(name, result)
                if difference:
                    found[template.name].differences[name] = difference
    return found


@dataclass
class Explanations:
    """What explains the differences of all templates."""

    told: list[str] = field(default_factory=list)
    """A line for each sentence, with the answers that it is true of."""
    failures: list[str] = field(default_factory=list)
    """A line for each difference without a sentence, and for each sentence without a difference."""


def explain(verdicts: Sequence[tuple[TemplateFile, Verdict]], comparisons: Mapping[str, Comparison]) -> Explanations:
    """Find the sentence of each difference."""
    found = Explanations()
    places: dict[Disagreement, list[str]] = {disagreement: [] for disagreement in DISAGREEMENTS}
    for template, _ in verdicts:
        answers = dict[Disagreement, list[str]]()
        for answer, difference in comparisons[template.name].differences.items():
            disagreement = explanation(template.name, template.family, answer)
            if disagreement is None:
                found.failures.append(f"vLLM differs, {template.family} {template.name}, {answer}: {difference}")
            else:
                answers.setdefault(disagreement, []).append(answer)
        for disagreement, names in answers.items():
            places[disagreement].append(f"{template.name} ({', '.join(names)})")
    for disagreement, where in places.items():
        if where:
            found.told.append(f"{disagreement.why} In: {', '.join(where)}.")
        else:
            found.failures.append(f"vLLM does not differ where a sentence says so: {disagreement.why}")
    return found


def _id(template: TemplateFile, answer: str) -> str:
    return f"{template.name}: {answer}"


def _difference(answer: str, result: Mapping[str, Any]) -> str:
    """Return what vLLM read otherwise, and in which way of reading; empty if it read the calls."""
    expected = [(call.name, call.arguments) for call in ANSWERS[answer].calls]
    found = []
    for way in WAYS:
        if _calls(result[way]) != expected:
            found.append(f"{way} {json.dumps(result[way], ensure_ascii=False)}")
    return ", ".join(found)


def _calls(reading: Mapping[str, Any]) -> list[tuple[str, Any]] | None:
    calls = []
    for call in reading.get("calls") or ():
        try:
            calls.append((call["name"], json.loads(call["arguments"])))
        except ValueError:
            return None
    return calls


def _vocabulary(family_name: str) -> list[str]:
    """Return the family's marks, which a model of it has as tokens."""
    family = BY_PARSER[family_name]
    marks = set(_MORE_TOKENS.get(family_name, ()))
    for text in family.texts:
        marks.update(MARKER.findall(text))
    return sorted(mark for mark in marks if "NAME" not in mark and "KEY" not in mark)
