"""The parameters in docs/openai.md, written from the models that read them: `python -m tests.openai_table`."""

from __future__ import annotations

import re
from pathlib import Path

import orjson

from gateway.api.schemas import IGNORED, NEUTRAL, ChatBody, CompletionBody

DOCUMENT = Path(__file__).parents[1] / "docs/openai.md"
START, END = "<!-- parameters: make openai-table -->\n", "<!-- end of parameters -->\n"


def table() -> str:
    """Return the tables of what is honoured, what is ignored and what is refused."""
    models = {"completions": CompletionBody, "chat": ChatBody}
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


def written(document: str) -> str:
    """Return the document with today's tables in it."""
    begin, end = re.escape(START), re.escape(END)
    return re.sub(f"{begin}.*{end}", lambda _: f"{START}\n{table()}\n{END}", document, flags=re.DOTALL)


if __name__ == "__main__":
    DOCUMENT.write_text(written(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
