"""Reads the same texts with vLLM's parsers, in vLLM's own environment, and compares."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.tools.call_families import BY_PARSER
from gateway.tools.cursor import MARKER
from tests.tool_forms.chats import ANSWERS, TOOLS
from tests.tool_forms.oracle import Verdict
from tests.tool_forms.templates import VLLM_DIFFERS, VLLM_PARSERS, TemplateFile

MODULE = "tests.tool_forms.vllm_oracle"


@dataclass
class Comparison:
    """What vLLM's parser read of a template's answers."""

    num_same: int = 0
    num_cases: int = 0
    differences: dict[str, str] = field(default_factory=dict)
    """What vLLM read in place of the template's calls, by the name of the answer."""
    error: str = ""

    def told(self, template: TemplateFile) -> str:
        """Return the table's word."""
        if self.error:
            return f"not run: {self.error}"
        if not self.num_cases:
            return "writes no calls"
        word = f"{self.num_same} of {self.num_cases}"
        if any(f"{template.name}: {name}" not in VLLM_DIFFERS for name in self.differences):
            return f"{word}, unexplained"
        return word


def compare(python: str, verdicts: Sequence[tuple[TemplateFile, Verdict]]) -> dict[str, Comparison]:
    """Return what vLLM's parsers make of the answers of each template, by its name.

    `python`: of an environment with vLLM.
    """
    cases = []
    for template, verdict in verdicts:
        for name, text in verdict.texts.items():
            cases.append(
                {
                    "id": f"{template.name}: {name}",
                    "parser": VLLM_PARSERS.get(template.family, template.family),
                    "text": text,
                    "tools": [tool.for_template() for tool in TOOLS],
                    "vocabulary": _vocabulary(template.family),
                }
            )
    made = subprocess.run(
        [python, "-m", MODULE], input=json.dumps({"cases": cases}), capture_output=True, text=True, check=True
    )
    results = {result["id"]: result for result in json.loads(made.stdout)["results"]}
    found = {}
    for template, verdict in verdicts:
        found[template.name] = _compared(template, verdict, results)
    return found


def _compared(template: TemplateFile, verdict: Verdict, results: Mapping[str, Any]) -> Comparison:
    comparison = Comparison()
    for name in verdict.texts:
        result = results[f"{template.name}: {name}"]
        expected = [(call.name, call.arguments) for call in ANSWERS[name].calls]
        comparison.num_cases += 1
        for way in ("whole", "streamed"):
            if _calls(result[way]) != expected:
                comparison.differences[name] = f"{way}: {json.dumps(result[way], ensure_ascii=False)}"
        if name not in comparison.differences:
            comparison.num_same += 1
    errors = {results[f"{template.name}: {name}"]["whole"].get("error", "") for name in verdict.texts}
    if verdict.texts and "" not in errors:
        comparison.error = sorted(errors)[0]
    return comparison


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
    marks = set[str]()
    for text in family.texts:
        marks.update(MARKER.findall(text))
    return sorted(mark for mark in marks if "NAME" not in mark and "KEY" not in mark)
