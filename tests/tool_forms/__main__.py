"""Hold calls, their grammars and their history to what chat templates write.

Without TEMPLATES the repository's own templates are tried. With a folder of public ones, which has a `sources.json`,
the table docs/reports/tool-forms.md is written. The exit code is 1 if a template does not pass without a known reason.
"""

import argparse
import json
import os
import sys
from pathlib import Path

from gateway.tools.call_families import BY_PARSER, JSON
from gateway.tools.recognition import families_shown
from tests.tool_forms.oracle import families_in, judge
from tests.tool_forms.table import DOCUMENT, document, needless, unexpected
from tests.tool_forms.templates import PUBLIC, RECOGNISED, TOOLLESS, UNREAD, own_templates, public_templates
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
        print(f"{template.family} {template.name}: {len(verdict.read)} of {len(verdict.texts)} read", flush=True)
    failures += needless(verdicts)
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
    """Return sentences about the templates of a folder that are not in the table, and failures."""
    sentences = list[str]()
    failures = list[str]()
    seen = {template.source for template in public_templates(folder)}
    tried = {name for names in PUBLIC.values() for name in names}
    num_same = 0
    num_without_tools = 0
    recognised = dict[str, list[str]]()
    toolless = dict[str, list[str]]()
    names = json.loads((folder / "sources.json").read_text(encoding="utf-8"))
    # those of UNREAD come first, so that none is passed over as a copy
    for name in [*UNREAD, *sorted({*names} - {*tried, *UNREAD})]:
        path = folder / f"{name}.jinja"
        if not path.exists():
            sentences.append(f"{name} is not in the folder of templates: nothing is known of it.")
            continue
        source = path.read_text(encoding="utf-8")
        if source in seen:
            num_same += 1
            continue
        seen.add(source)
        families = families_in(source)
        if families.unknown_tag:
            sentences.append(f"{name} writes calls with `{families.unknown_tag}`, which is said and not read.")
        elif name in UNREAD:
            failures.append(f"{name} is of no family, and that is not said: {families.describe()}")
        elif families.calls is not None:
            recognised.setdefault(families.calls.name, []).append(name)
            if name not in RECOGNISED.get(families.calls.name, ()):
                failures.append(f"{name} is taken for {families.calls.name}, and is in no list of it")
        else:
            # what its text shows, whether it takes tools or not; JSON is the family of a text that shows none
            shown = families_shown(source, accepts_tools=True).calls
            if shown is None or shown is JSON:
                num_without_tools += 1
            else:
                toolless.setdefault(shown.name, []).append(name)
                if name not in TOOLLESS.get(shown.name, ()):
                    failures.append(f"{name} takes no tools, and its text is taken for {shown.name}")
    for family, names in recognised.items():
        sentences.append(f"Recognised as `{family}`, and not tried further: {', '.join(names)}.")
    for family, names in toolless.items():
        sentences.append(
            f"Without tools, so that a request with tools is refused, and with calls of `{family}` in the text: "
            f"{', '.join(names)}."
        )
    sentences.append(
        f"{num_without_tools} more templates take no tools. Recognition by their text alone, as if they took tools, "
        "finds no mark of a family in any."
    )
    sentences.append(f"{num_same} more files are copies of templates above.")
    return sentences, failures


if __name__ == "__main__":
    sys.exit(main())
