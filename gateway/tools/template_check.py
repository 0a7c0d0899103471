"""Finds in which forms the calls and the reasoning of a model with a given chat template are read.

`outrider doctor` runs it as `python -m gateway.tools.template_check` with a model's templates in JSON on stdin: `file`,
`configured` and `additional`, as `template_of_files` takes them. It prints a finding as a JSON object.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from gateway.chat_template import FOR_TOOLS, Variant, template_of_files
from gateway.confined import templates
from gateway.confined.template_shape import TemplateShape
from gateway.tools.recognition import families_shown
from outrider.wire.errors import InvalidRequest
from outrider.wire.processes.processes import write_event

_REMEDY = "name the family: --tool-call-parser NAME, or give the gateway another template: --chat-template FILE"


def finding(task: dict[str, Any]) -> tuple[str, str, str]:
    """Return how the calls and reasoning of a model are read, as (state, what was found, remedy).

    The state is "ok", "warning" or "problem"; the remedy is empty for "ok". `task`: the model's chat templates under
    the keys `file`, `configured` and `additional`.
    """
    additional = {name: text.encode() for name, text in task["additional"].items()}
    file = template_of_files(task["file"].encode(), task["configured"], None, additional)
    if file is None:
        return "ok", "the model has no chat template, so it takes no tools", ""
    source = file.named.get(FOR_TOOLS, file.source)
    try:
        reads = templates.work({"kind": "check", "source": source})
        shape = templates.work({"kind": "probe", "source": source, "names": {}})
    except InvalidRequest as error:
        return "problem", f"{file.name} {error.message}", "give the gateway another template: --chat-template FILE"
    template = Variant(source, frozenset(reads), TemplateShape(**shape))
    families = families_shown(source, accepts_tools=template.accepts_tools)
    if families.unknown_tag:
        return "warning", families.describe(), _REMEDY
    return "ok", families.describe(), ""


def main() -> int:
    """Check the templates on stdin and print the finding. Return the exit code, 0."""
    state, found, remedy = finding(json.loads(sys.stdin.readline()))
    write_event({"event": "found", "check": "chat template", "state": state, "found": found, "remedy": remedy})
    return 0


if __name__ == "__main__":
    sys.exit(main())
