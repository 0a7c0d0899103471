"""`outrider alpha`: how well drafters guess a target, before anything is deployed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.console import answer_console, errors_as_lines, note_console
from outrider.cli.demo.demo_runs import first_prompts
from outrider.cli.progress import telling
from outrider.cli.up.child_events import events_of
from outrider.wire.errors import ConfigError, OutriderError
from outrider.wire.models.model_id import local_path
from outrider.wire.requests.drafters import TABLE_DRAFTERS, Drafter
from outrider.wire.requests.params import ANY_VOCABULARY, SamplingParams
from outrider.wire.settings.config import TargetConfig
from outrider.wire.settings.system import demo_model

KINDS = (Drafter.MODEL, *TABLE_DRAFTERS)
DTYPES = get_args(TargetConfig.model_fields["dtype"].annotation)
_PARTS = {None, *TABLE_DRAFTERS}
_COMBINED = [each for each in Drafter if each.needs_draft_worker and each.own in _PARTS and each is not Drafter.MODEL]

Draft = Annotated[
    list[str] | None,
    typer.Option(
        help="A drafter, may be given several times: model:FOLDER (or only the folder or hub id), ngram, "
        "lookup, unigram:TEXTFILE, bigram:TEXTFILE."
    ),
]
Prompts = Annotated[
    Path | None, typer.Option(help="JSONL file, a `prompt` in each line; absent = those of the demo pair.")
]
Temperature = Annotated[list[float] | None, typer.Option(help="May be given several times; absent = 0 and 1.")]


def alpha(
    target: Annotated[str | None, typer.Option(help="Folder, GGUF file or hub id; absent = the demo pair's.")] = None,
    draft: Draft = None,
    prompts: Prompts = None,
    temperature: Temperature = None,
    top_p: Annotated[float, typer.Option(help="Of every setting.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Of every setting.")] = 0,
    min_p: Annotated[float, typer.Option(help="Of every setting.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="Tokens that the target writes to each prompt, at most.")] = 128,
    num_prompts: Annotated[int, typer.Option(help="The first so many of the file.")] = 24,
    dtype: Annotated[str, typer.Option(help=f"Of all models: {', '.join(DTYPES)}.")] = "auto",
    device: Annotated[str, typer.Option(help="Of all models, as in the workers' settings.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Measure how often a target would accept what drafters propose, per sampling setting.

    alpha is the mean of the sum of min(target, draft), the probability that a draft token is kept under rejection
    (Leviathan et al. 2023, Table 3); coupled and greedy are how often the draft's token is the target's under those
    rules. Beside them stands the temperature at which the draft alone would have to draw for the largest alpha.
    """
    with errors_as_lines():
        for name, value in (("max-tokens", max_tokens), ("num-prompts", num_prompts)):
            if value < 1:
                raise ConfigError(f"--{name} is {value}, must be at least 1")
        if dtype not in DTYPES:
            raise ConfigError(f"--dtype is {dtype!r}, must be one of {', '.join(DTYPES)}")
        texts = first_prompts(prompts, num_prompts)
        drafters = [drafter_of(text) for text in draft or [demo_model("draft")]]
        for model in (target, *(each["source"] for each in drafters if each["kind"] == "model")):
            if model is not None:
                local_path(model)  # what is not there is told at once
        settings = [
            {"temperature": each, "top_p": top_p, "top_k": top_k, "min_p": min_p} for each in temperature or [0.0, 1.0]
        ]
        for each in settings:
            SamplingParams(**each).check(ANY_VOCABULARY)  # type: ignore[arg-type]
        task = {
            "target": target or demo_model("target"),
            "drafters": drafters,
            "prompts": texts,
            "max_tokens": max_tokens,
            "settings": settings,
            "dtype": dtype,
            "device": device,
        }
        rows = measured(task, note_console())
        if as_json:
            typer.echo(json.dumps({"rows": rows}))
        else:
            show(rows, answer_console())


def drafter_of(text: str) -> dict[str, str | None]:
    """Read one drafter of the command line. Raises ConfigError naming what is missing."""
    kind, _, source = text.partition(":")
    if text in _COMBINED:
        parts = text.replace("&", "+").replace("+", " and ")
        raise ConfigError(f"--draft {text}: measure its two parts, {parts}, one beside the other")
    if kind not in KINDS:
        if "/" not in text and not Path(text).expanduser().exists():
            raise ConfigError(
                f"--draft {text}: neither a folder nor a drafter, which are {', '.join(KINDS)}; "
                f"of a hub id without an owner say model:{text}"
            )
        return {"kind": "model", "source": text}
    if kind in ("ngram", "lookup"):
        if source:
            raise ConfigError(f"--draft {text}: {kind} learns from the answer itself and takes no file")
        return {"kind": kind, "source": None}
    if not source:
        what = "a text file" if Drafter(kind).reads_text else "a model folder"
        raise ConfigError(f"--draft {text}: {kind} needs {what}, such as {kind}:PATH")
    return {"kind": kind, "source": source}


def measured(task: dict[str, Any], notes: Console) -> list[dict[str, Any]]:
    """Measure in a process of its own, which has torch. Raises OutriderError with what is wrong."""
    found = events_of("outrider.lab.models.alpha", task, "measurement", grace_s=1.0)
    with telling(notes, "starting") as tell, closing(found) as events:
        for event in events:
            if event["event"] == "measured":
                rows: list[dict[str, Any]] = event["rows"]
                return rows
            tell(event["text"])
    raise OutriderError("the measurement gave no result")


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print a table for each setting."""
    names = names_of({row["drafter"] for row in rows})
    for setting in {json.dumps(row["setting"]): row["setting"] for row in rows}.values():
        own = [row for row in rows if row["setting"] == setting]
        off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        words = ", ".join(f"{name} {value:g}" for name, value in setting.items() if off.get(name) != value)
        title = f"{words}; {own[0]['num_tokens']} tokens of the target"
        table = Table(title=title, title_justify="left", box=None, pad_edge=False)
        table.add_column("drafter", overflow="fold")
        for name in ("alpha", "coupled", "at least", "greedy", "drafts at"):
            table.add_column(name, justify="right", no_wrap=True)
        for row in own:
            estimates = (shown(**row[name]) for name in ("alpha", "coupled", "bound", "greedy"))
            table.add_row(names[row["drafter"]], *estimates, f"{100 * row['drafted']['mean']:.0f} %")
        console.print(table)
    console.print(
        "alpha: kept under rejection, 1 - TV. coupled: the draft's token is the target's; at least: what is proved, "
        "(1 - TV) / (1 + TV). greedy: both have the same best token. drafts at: share of the tokens for which the "
        "drafter has a guess; the others are not in the means. After ± the 95 % interval over prompts, of two or more.",
        style="dim",
    )
    _show_temperatures(rows, names, console)


def _show_temperatures(rows: list[dict[str, Any]], names: Mapping[str, str], console: Console) -> None:
    table = Table(
        title="The draft's best temperature, where the target keeps its own",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    table.add_column("drafter", overflow="fold")
    for name in ("target's", "best", "alpha there", "gain"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        best = row["draft_temperature"]
        if best is not None:
            numbers = (f"{temperature:g}" for temperature in (row["setting"]["temperature"], best["temperature"]))
            table.add_row(names[row["drafter"]], *numbers, shown(**best["alpha"]), shown(**best["gain"]))
    console.print(table)


def shown(mean: float | None, error: float | None) -> str:
    """Return an estimate's mean and error as text."""
    if mean is None:
        return "-"
    return f"{mean:.3f}" if error is None else f"{mean:.3f}±{error:.3f}"


def names_of(drafters: Collection[str]) -> dict[str, str]:
    """Return each drafter with the end of its path, so that a row is a line: as much of it as no other one has."""

    def ends(drafter: str) -> list[str]:
        kind, _, source = drafter.partition(":")
        parts = Path(source).parts
        return [f"{kind}:{Path(*parts[start:])}" for start in reversed(range(len(parts)))] or [kind]

    num_of = Counter(end for drafter in drafters for end in ends(drafter))
    return {drafter: next((end for end in ends(drafter) if num_of[end] == 1), drafter) for drafter in drafters}
