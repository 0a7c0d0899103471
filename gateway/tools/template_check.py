"""Says in which families the calls and the reasoning of a chat template are read.

`outrider doctor` runs it as `python -m gateway.tools.template_check` with a model's templates in JSON on stdin: `file`,
`configured` and `additional`, as `template_of_files` takes them. It prints a finding as a JSON object.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from gateway.chat_template import ChatTemplate, TemplateFile, create_renderers, template_of_files
from gateway.tools.recognition import families_shown
from outrider.wire.errors import ConfigError
from outrider.wire.processes.processes import write_event
from outrider.wire.settings.config import GatewayConfig

_REMEDY = "name the family: --tool-call-parser NAME, or give the gateway another template: --chat-template FILE"


async def finding(task: dict[str, Any]) -> tuple[str, str, str]:
    """Return (state, what was found, remedy) of the check of a model's chat templates, for `outrider doctor`.

    task: `file`, `configured` and `additional`, as `template_of_files` takes them. state: ok, warning or problem.
    remedy: empty if there is nothing to do. The template is compiled and tried as the gateway does it: in a process of
    limited time and memory.
    """
    additional = {name: text.encode() for name, text in task["additional"].items()}
    file = template_of_files(task["file"].encode(), task["configured"], None, additional)
    if file is None:
        return "ok", "the model has no chat template, so it takes no tools", ""
    try:
        template = await _compiled(file)
    except ConfigError as error:
        return "problem", error.message, "give the gateway another template: --chat-template FILE"
    families = families_shown(template.tool_source, accepts_tools=template.accepts_tools)
    if families.unknown_tag:
        return "warning", families.describe(), _REMEDY
    return "ok", families.describe(), ""


async def _compiled(file: TemplateFile) -> ChatTemplate:
    renderers = create_renderers(GatewayConfig.model_fields["max_compile_s"].default)
    try:
        return await ChatTemplate.compiled(file, {}, renderers)
    finally:
        await renderers.close()


def main() -> int:
    """Check the chat templates on stdin and print the result as one JSON object. Return the exit code, 0."""
    state, found, remedy = asyncio.run(finding(json.loads(sys.stdin.readline())))
    write_event({"event": "found", "check": "chat template", "state": state, "found": found, "remedy": remedy})
    return 0


if __name__ == "__main__":
    sys.exit(main())
