"""`outrider bench`: how fast a running system serves at each concurrency, with speculation and without."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console

from outrider import __version__
from outrider.cli import options as opt
from outrider.cli.console import EXIT_FAILED, answer_console, errors_as_lines, note_console
from outrider.cli.over_http import gateway_url, trust_of
from outrider.cli.progress import StageProgress
from outrider.lab.load.figures import LEAST_TURNS, RungFigures, all_failed
from outrider.lab.load.ladder import Plan, climb
from outrider.lab.load.load import Load
from outrider.lab.load.machine import machine
from outrider.lab.load.plot import draw
from outrider.lab.load.prompts import prompts_of
from outrider.lab.load.report import show, to_json
from outrider.lab.load.server import TAKES_SALT, headers_of, model_at
from outrider.lab.tuning.picture import check_can_draw
from outrider.wire.errors import ConfigError
from outrider.wire.models.model_id import short_name
from outrider.wire.requests.params import ANY_VOCABULARY, SamplingParams

LADDER = (1, 2, 4, 8, 16)
SECONDS = 30.0

Concurrency = Annotated[
    list[int] | None,
    typer.Option(help=f"Requests at once; may be given several times; absent = {' '.join(map(str, LADDER))}."),
]
Requests = Annotated[
    int | None, typer.Option(help="Requests of a rung, with speculation and as many without; absent = by --seconds.")
]
Seconds = Annotated[
    float | None,
    typer.Option(
        help=f"Seconds after which no turn of a rung begins, once it has the {LEAST_TURNS} that an interval needs; "
        f"absent = {SECONDS:g}, or by --requests alone."
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        help="Prompts: JSONL with a `prompt` in each line (*.jsonl), or a text with one in each line; absent = some "
        "that come with the command."
    ),
]


@opt.grouped
def bench(
    *,
    gateway: Annotated[
        str, typer.Option(help="A gateway's address, or that of any server with OpenAI's interface.")
    ] = "http://127.0.0.1:8000",
    concurrency: Concurrency = None,
    requests: Requests = None,
    seconds: Seconds = None,
    prompts: Prompts = None,
    max_tokens: Annotated[int, typer.Option(help="Largest number of output tokens of an answer.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    connection: opt.CallOptions,
    png: Annotated[Path | None, typer.Option(help="Draw the plots into this file; needs matplotlib.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures into this file.")] = None,
) -> None:
    """Measure a running system: tokens per second and latencies at each concurrency, with speculation and without.

    Both take turns with the same prompts and seeds, so that the ratio is of one run; each answer pays for its whole
    prompt. A server that is no Outrider, or has no drafts, is measured as it is.
    """
    notes = note_console()
    with errors_as_lines():
        ladder = sorted(set(concurrency or LADDER))
        for name, value, least in (
            ("concurrency", ladder[0], 1),
            ("requests", requests, 1),
            ("max-tokens", max_tokens, 1),
            ("seconds", seconds, 0),
        ):
            if value is not None and value < least:
                raise ConfigError(f"--{name} is {value}, must be at least {least}")
        SamplingParams(temperature=temperature).check(ANY_VOCABULARY)
        if png is not None:
            check_can_draw(png)
        if json_file is not None and not json_file.absolute().parent.is_dir():
            raise ConfigError(f"--json {json_file}: there is no folder {json_file.absolute().parent}")
        load = Load(
            gateway_url(gateway, connection.options),
            prompts_of(prompts),
            max_tokens,
            temperatures=(temperature,),
            ignore_eos=False,
            timeout_s=connection.timeout,
            headers=headers_of(connection),
            verify=trust_of(connection.tls_ca, connection.tls_cert, connection.tls_key),
        )
        plan = Plan(ladder, requests, SECONDS if requests is None and seconds is None else seconds)
        facts = _facts(load)
        model, rungs, interrupted = asyncio.run(_measure(load, plan, connection.model, notes))
        if interrupted:
            notes.print(f"interrupted: {len(rungs)} of {len(ladder)} rungs are through")
            if not rungs:
                raise KeyboardInterrupt
        if json_file is not None:
            found = {**facts, "served": model, "interrupted": interrupted, "rungs": to_json(rungs)}
            json_file.write_text(json.dumps(found, indent=1) + "\n")
            notes.print(f"written: {json_file}", markup=False)
        console = answer_console()
        head = f"{_named(model)} at {load.url}: up to {max_tokens} tokens, temperature {temperature:g}\n"
        console.print(head, markup=False)
        show(rungs, console)
        if png is not None and not all_failed(rungs):
            draw(rungs, f"{_named(model)}, temperature {temperature:g}", png)
            notes.print(f"drawn: {png}", markup=False)
        if interrupted:
            raise KeyboardInterrupt
        if all_failed(rungs):
            raise typer.Exit(EXIT_FAILED)


async def _measure(
    load: Load, plan: Plan, wanted: str | None, notes: Console
) -> tuple[Mapping[str, Any], Sequence[RungFigures], bool]:
    """Return the model, the rungs that were finished, and whether Ctrl-C came before the last."""
    async with load.client() as client:
        model = await model_at(client, wanted)
        both_arms = bool(model.get("drafters"))
        if not both_arms:
            notes.print(f"{_named(model)} is measured as it is: {_why_one_arm(model)}", markup=False)
        asked, rungs = _of_model(load, model), list[RungFigures]()
        with StageProgress(notes) as progress:
            try:
                async for rung in climb(client, asked, plan, both_arms, progress):
                    rungs.append(rung)
            except asyncio.CancelledError:
                return model, rungs, True
        return model, rungs, False


def _of_model(load: Load, model: Mapping[str, Any]) -> Load:
    return replace(load, extra={"model": model["id"]}, shared_prefixes=model.get("owned_by") not in TAKES_SALT)


def _why_one_arm(model: Mapping[str, Any]) -> str:
    if "drafters" in model:
        return "nobody drafts for it now (outrider up --draft, or --drafter auto)"
    return "this server does not say who drafts, so it is not asked to leave speculation"


def _named(model: Mapping[str, Any]) -> str:
    draft = model.get("draft")
    return short_name(model["id"]) + (f", drafted for by {short_name(draft)}" if draft else "")


def _facts(load: Load) -> dict[str, Any]:
    return {
        "command": shlex.join(["outrider", *sys.argv[1:]]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine of the load": machine(),
        "versions": {"outrider": __version__, "httpx": httpx.__version__},
        "load": {
            "url": load.url,
            "num_prompts": len(load.prompts),
            "max_tokens": load.max_tokens,
            "temperature": load.temperatures[0],
        },
    }
