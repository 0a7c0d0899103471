"""Hold calls, their grammars and their history to what chat templates write.

Without TEMPLATES the repository's own templates are tried. With a folder of public ones, which has a `sources.json`,
the table docs/reports/tool-forms.md is written. The exit code is 1 if a template does not pass without a known reason.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from gateway.tools.call_families import BY_PARSER
from tests.tool_forms.oracle import families_in, judge
from tests.tool_forms.table import DOCUMENT, document, unexpected
from tests.tool_forms.templates import PUBLIC, UNREAD, own_templates, public_templates
from tests.tool_forms.vllm_readings import Comparison, Explanations, compare, explain


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = os.environ.get("TEMPLATES")
    parser.add_argument("--templates", type=Path, default=folder, help="folder of public templates; or TEMPLATES=")
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM, whose parsers read the same")
    args = parser.parse_args()
    templates = own_templates()
    if args.templates:
        templates = public_templates(Path(args.templates))
    verdicts = []
    failures = list[str]()
    for template in templates:
        verdict = judge(template.source, BY_PARSER[template.family])
        verdicts.append((template, verdict))
        failures += unexpected(template, verdict)
        print(f"{template.family} {template.name}: {verdict.num_read} of {len(verdict.texts)} read", flush=True)
    comparisons = dict[str, Comparison]()
    explanations = Explanations()
    if args.vllm:
        comparisons = compare(args.vllm, verdicts)
        explanations = explain(verdicts, comparisons)
        failures += explanations.failures
    if args.templates:
        others, mistaken = _others(Path(args.templates))
        failures += mistaken
        DOCUMENT.write_text(document(verdicts, comparisons, explanations.told, others), encoding="utf-8")
        print(f"wrote {DOCUMENT}")
    for failure in failures:
        print(f"failed: {failure}")
    return int(bool(failures))


def _others(folder: Path) -> tuple[list[str], list[str]]:
    """Return sentences about the templates of a folder that are of no family, and failures."""
    known = {name for names in PUBLIC.values() for name in names}
    sentences = list[str]()
    failures = list[str]()
    num_without_tools = 0
    for name in sorted(json.loads((folder / "sources.json").read_text(encoding="utf-8"))):
        path = folder / f"{name}.jinja"
        if name in known or not path.exists():
            continue
        families = families_in(path.read_text(encoding="utf-8"))
        if families.calls is None and not families.unknown_tag:
            num_without_tools += 1
        elif name in UNREAD:
            sentences.append(f"{name} writes calls with `{families.unknown_tag}`, which is said and not read.")
            if families.calls is not None:
                failures.append(f"{name} is of no family, and is taken for {families.calls.name}")
    sentences.append(f"{num_without_tools} more templates take no tools, and none is taken for a family.")
    return sentences, failures


if __name__ == "__main__":
    sys.exit(main())
