"""The parameters in docs/openai.md, written from the models that read them: `python -m tests.openai_table`."""

import re
from pathlib import Path
from typing import Any

import orjson
from pydantic import BaseModel

from gateway.api.layers.messages_schemas import MESSAGES_IGNORED, MESSAGES_NEUTRAL, MessagesBody
from gateway.api.layers.responses_options import RESPONSES_IGNORED, RESPONSES_NEUTRAL
from gateway.api.layers.responses_schemas import ResponsesBody
from gateway.api.schemas.openai import ChatBody, CompletionBody
from gateway.api.schemas.other_parameters import IGNORED, NEUTRAL

DOCUMENT = Path(__file__).parents[1] / "docs/openai.md"
START, END = "<!-- parameters: make openai-table -->\n", "<!-- end of parameters -->\n"


def table() -> str:
    """Return the tables of what is honoured, what is ignored and what is refused."""
    models: dict[str, type[BaseModel]] = {"completions": CompletionBody, "chat": ChatBody}
    fields = CompletionBody.model_fields | ChatBody.model_fields
    lines = ["### Honoured", "", "| parameter | endpoints | default | what it takes |", "|---|---|---|---|"]
    for name, field in sorted(fields.items(), key=lambda each: not each[1].is_required()):
        having = [endpoint for endpoint, model in models.items() if name in model.model_fields]
        endpoints = "both" if len(having) == 2 else having[0]
        told = [model.model_fields[name].description or "" for model in models.values() if name in model.model_fields]
        text, _, default = told[0].partition("Default: ")
        if len(set(told)) > 1:
            text = f"completions: {text.rstrip('. ')}. Chats: {told[1]}"
        default = "required" if field.is_required() else default or "none"
        lines.append(f"| `{name}` | {endpoints} | {default} | {text.rstrip('.; ')} |")
    lines += ["", "### Accepted, changing nothing", "", "| parameter | why |", "|---|---|"]
    lines += [f"| `{name}` | {why} |" for name, why in IGNORED.items()]
    lines += [
        "",
        "### Refused by name",
        "",
        "Values that ask for nothing are let through, so that clients which always",
    ]
    lines[-1] += " send them work."
    lines += ["", "| parameter | let through |", "|---|---|"]
    for name, values in NEUTRAL.items():
        lines.append(f"| `{name}` | {', '.join(f'`{orjson.dumps(value).decode()}`' for value in values)} |")
    return "\n".join(lines) + "\n"


def layer_table(model: type[BaseModel], ignored: dict[str, str], neutral: dict[str, tuple[Any, ...]]) -> str:
    """Return the table of what a layer takes."""
    lines = ["| parameter | default | what it takes |", "|---|---|---|"]
    for name, field in sorted(model.model_fields.items(), key=lambda each: not each[1].is_required()):
        text, _, default = (field.description or "").partition("Default: ")
        default = "required" if field.is_required() else default or "none"
        lines.append(f"| `{name}` | {default} | {text.rstrip('.; ')} |")
    lines += [f"| `{name}` | | ignored: {why} |" for name, why in ignored.items()]
    for name, values in neutral.items():
        but = ", ".join(f"`{orjson.dumps(value).decode()}`" for value in values)
        lines.append(f"| `{name}` | | refused{' unless it is ' * bool(but)}{but} |")
    return "\n".join(lines) + "\n"


LAYERS = {
    "/v1/responses": lambda: layer_table(ResponsesBody, RESPONSES_IGNORED, RESPONSES_NEUTRAL),
    "/v1/messages": lambda: layer_table(MessagesBody, MESSAGES_IGNORED, MESSAGES_NEUTRAL),
}


def written(document: str) -> str:
    """Return the document with today's tables in it."""
    tables = {(START, END): table()}
    for path, make in LAYERS.items():
        ends = f"<!-- parameters of {path}: make openai-table -->\n", f"<!-- end of parameters of {path} -->\n"
        tables[ends] = make()
    for (start, end), text in tables.items():
        whole = f"{start}\n{text}\n{end}"
        document = re.sub(f"{re.escape(start)}.*{re.escape(end)}", lambda _: whole, document, flags=re.DOTALL)  # noqa: B023
    return document


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
