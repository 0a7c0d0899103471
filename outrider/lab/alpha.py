"""`outrider alpha`: measures how often a target would accept what drafters propose, before anything is deployed.

`lab/models/alpha.py` does the work in a child process, which imports torch.
"""

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
from outrider.cli.progress import reporting
from outrider.cli.up.child_events import run_module
from outrider.wire.errors import ConfigError, OutriderError
from outrider.wire.models.model_id import local_path
from outrider.wire.requests.drafters import TABLE_DRAFTERS, Drafter
from outrider.wire.requests.params import ANY_VOCABULARY, SamplingParams
from outrider.wire.settings.config import TargetConfig
from outrider.wire.settings.system import demo_model

KINDS = (Drafter.MODEL, *TABLE_DRAFTERS)
"""Kinds of drafters that `outrider alpha` can measure: draft models, and the drafters that use tables of tokens."""
DTYPES = get_args(TargetConfig.model_fields["dtype"].annotation)

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
    top_p: Annotated[float, typer.Option(help="At every temperature.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="At every temperature; 0 = off.")] = 0,
    min_p: Annotated[float, typer.Option(help="At every temperature.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="Tokens that the target writes to each prompt, at most.")] = 128,
    num_prompts: Annotated[int, typer.Option(help="Number of prompts to use, from the first on.")] = 24,
    dtype: Annotated[str, typer.Option(help=f"Of all models: {', '.join(DTYPES)}.")] = "auto",
    device: Annotated[str, typer.Option(help="Of all models, as in the workers' settings.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")] = False,
) -> None:
    """Measure how often a target would accept what drafters propose, per sampling setting.

    The column alpha has the probability that the rule `rejection` accepts a draft token: the mean of the sum of
    min(target, draft) (Leviathan et al. 2023, Table 3). The columns coupled and greedy have how often draft and target
    choose the same token, under the rule `coupled` and at temperature 0. A last table has, for each draft model, the
    temperature of the draft at which alpha is largest.
    """
    with errors_as_lines():
        for name, value in (("max-tokens", max_tokens), ("num-prompts", num_prompts)):
            if value < 1:
                raise ConfigError(f"--{name} is {value}, must be at least 1")
        if dtype not in DTYPES:
            raise ConfigError(f"--dtype is {dtype!r}, must be one of {', '.join(DTYPES)}")
        texts = first_prompts(prompts, num_prompts)
        drafters = [parse_drafter(text) for text in draft or [demo_model("draft")]]
        _check_paths(target, drafters)
        settings = list[dict[str, float]]()
        for of_setting in temperature or [0.0, 1.0]:
            settings.append({"temperature": of_setting, "top_p": top_p, "top_k": top_k, "min_p": min_p})
        for setting in settings:
            SamplingParams(**setting).check(ANY_VOCABULARY)  # type: ignore[arg-type]
        task = {
            "target": target or demo_model("target"),
            "drafters": drafters,
            "prompts": texts,
            "max_tokens": max_tokens,
            "settings": settings,
            "dtype": dtype,
            "device": device,
        }
        rows = measure(task, note_console())
        if as_json:
            typer.echo(json.dumps({"rows": rows}))
        else:
            show(rows, answer_console())


def _check_paths(target: str | None, drafters: list[dict[str, str | None]]) -> None:
    """Raise ConfigError if the path of a model does not exist. Call it before anything is measured."""
    if target is not None:
        local_path(target)
    for drafter in drafters:
        if drafter["kind"] == "model" and drafter["source"] is not None:
            local_path(drafter["source"])


def _is_combined(text: str) -> bool:
    # "ngram+model": n-grams, and the draft model where they have nothing
    if text not in [drafter.value for drafter in Drafter]:
        return False
    drafter = Drafter(text)
    own_drafters = {None, *TABLE_DRAFTERS}
    return drafter.needs_draft_worker and drafter.own in own_drafters and drafter is not Drafter.MODEL


def parse_drafter(text: str) -> dict[str, str | None]:
    """Parse a drafter given on the command line, such as model:FOLDER or ngram. Return {"kind", "source"}, where
    `source` is the folder, hub id or text file after the colon. `source` is None for the kinds that take none, ngram
    and lookup.

    Raises ConfigError if the text does not name a drafter.
    """
    kind, _, source = text.partition(":")
    if _is_combined(text):
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
        what = "a model folder"
        if Drafter(kind).reads_text:
            what = "a text file"
        raise ConfigError(f"--draft {text}: {kind} needs {what}, such as {kind}:PATH")
    return {"kind": kind, "source": source}


def measure(task: dict[str, Any], notes: Console) -> list[dict[str, Any]]:
    """Run the measurement in a child process, so that the calling process need not import torch. Return one row of
    estimates for each pair of a sampling setting and a drafter (see `Tally.row`).

    task: the fields of `outrider.lab.models.alpha_task.AlphaTask`. notes: console on which the progress is shown.
    Raises OutriderError if the measurement fails.
    """
    found = run_module("outrider.lab.models.alpha", task, "measurement", grace_s=1.0)
    with reporting(notes, "starting") as show_message, closing(found) as events:
        for event in events:
            if event["event"] == "measured":
                rows: list[dict[str, Any]] = event["rows"]
                return rows
            show_message(event["text"])
    raise OutriderError("the measurement gave no result")


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """Print one table of acceptance per sampling setting. Then print a table with the temperature of each draft model
    at which its alpha is largest, while the target keeps its own temperature.
    """
    names = names_of({row["drafter"] for row in rows})
    rows_by_setting = dict[str, list[dict[str, Any]]]()
    for row in rows:
        rows_by_setting.setdefault(json.dumps(row["setting"]), []).append(row)
    for own in rows_by_setting.values():
        title = f"{_setting_text(own[0]['setting'])}; {own[0]['num_tokens']} tokens of the target"
        table = _table(title, "alpha", "coupled", "at least", "greedy", "drafts at")
        for row in own:
            estimates = [format_estimate(**row[name]) for name in ("alpha", "coupled", "bound", "greedy")]
            table.add_row(names[row["drafter"]], *estimates, f"{100 * row['drafted']['mean']:.0f} %")
        console.print(table)
    console.print(
        "alpha: accepted under rejection, 1 - TV. coupled: the draft's token is the target's; at least: what is "
        "proved, (1 - TV) / (1 + TV). greedy: both have the same best token. drafts at: share of the tokens for which "
        "the drafter proposes one; the others are not in the means. After ± the 95 % interval over prompts, of two or "
        "more.",
        style="dim",
    )
    _show_temperatures(rows, names, console)


def _setting_text(setting: Mapping[str, float]) -> str:
    # {"temperature": 1.0, "top_p": 0.9, "top_k": 0, "min_p": 0.0}: "temperature 1, top_p 0.9"
    off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return ", ".join(f"{name} {value:g}" for name, value in setting.items() if off.get(name) != value)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("drafter", overflow="fold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _show_temperatures(rows: list[dict[str, Any]], names: Mapping[str, str], console: Console) -> None:
    title = "The draft's best temperature, where the target keeps its own"
    table = _table(title, "target's", "best", "alpha there", "gain")
    for row in rows:
        best = row["draft_temperature"]
        if best is not None:
            table.add_row(
                names[row["drafter"]],
                f"{row['setting']['temperature']:g}",
                f"{best['temperature']:g}",
                format_estimate(**best["alpha"]),
                format_estimate(**best["gain"]),
            )
    console.print(table)


def format_estimate(mean: float | None, error: float | None) -> str:
    """Return an estimate as text, such as "0.712±0.021". mean: the estimated mean; None gives "-". error: half the
    width of its 95 % interval; None leaves the interval out.
    """
    if mean is None:
        return "-"
    if error is None:
        return f"{mean:.3f}"
    return f"{mean:.3f}±{error:.3f}"


def names_of(drafters: Collection[str]) -> dict[str, str]:
    """Return a short name for each drafter, by its full name (kind:path). The short name has the kind and only as many
    of the path's last parts as make it unique: model:x, or model:a/x and model:b/x.
    """
    # "model:/a/x", "model:/b/x": "model:a/x", "model:b/x"
    num_drafters = Counter[str]()
    for drafter in drafters:
        num_drafters.update(_ends(drafter))
    names = dict[str, str]()
    for drafter in drafters:
        names[drafter] = drafter
        for end in _ends(drafter):
            if num_drafters[end] == 1:
                names[drafter] = end
                break
    return names


def _ends(drafter: str) -> list[str]:
    # "model:/a/x": ["model:x", "model:a/x", "model:/a/x"]
    kind, _, source = drafter.partition(":")
    parts = Path(source).parts
    ends = [f"{kind}:{Path(*parts[start:])}" for start in reversed(range(len(parts)))]
    return ends or [kind]
