"""`outrider doctor`: finds what would go wrong on this machine, and with a pair, before anything is started."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from outrider.cli.console import EXIT_FAILED, answer_console, errors_as_lines, note_console
from outrider.cli.doctor.machine import Finding, checks
from outrider.cli.progress import reporting
from outrider.cli.up.child_events import run_module
from outrider.lab.alpha import DTYPES
from outrider.wire.errors import ConfigError, OutriderError
from outrider.wire.requests.drafters import TABLE_DRAFTERS
from outrider.wire.settings.config import GatewayConfig
from outrider.wire.settings.system import demo_model

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}
_FIELDS = GatewayConfig.model_fields

Draft = Annotated[
    list[str] | None,
    typer.Option(
        help=f"Folder, GGUF file or hub id of a draft, a model or a head, or {', '.join(TABLE_DRAFTERS)}; "
        "may be given several times."
    ),
]


def doctor(
    target: Annotated[
        str | None,
        typer.Option(help="Folder, GGUF file or hub id; absent = the demo pair, where --draft names no model."),
    ] = None,
    draft: Draft = None,
    host: Annotated[str, typer.Option(help="Host on which the gateway is to listen.")] = _FIELDS["host"].default,
    port: Annotated[int, typer.Option(min=0, max=65535, help="HTTP port of the gateway.")] = _FIELDS["port"].default,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC port of the gateway.")] = _FIELDS[
        "grpc_port"
    ].default,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    dtype: Annotated[str, typer.Option(help=f"Dtype of all models: {', '.join(DTYPES)}.")] = "auto",
) -> None:
    """Check what would go wrong here: versions, cores, ports, memory, GPU, compiler, a draft that does not fit a
    target.

    Prints a line for each check, and the remedy below each problem. Of models only configurations and tokenizers are
    read, of heads also the weights. The exit code is 1 if there is a problem.
    """
    with errors_as_lines():
        if dtype not in DTYPES:
            raise ConfigError(f"--dtype is {dtype!r}, must be one of {', '.join(DTYPES)}")
        tables = list[str]()
        drafts = list[str]()
        for name in draft or ():
            if name.partition(":")[0] in TABLE_DRAFTERS:
                tables.append(name)
            else:
                drafts.append(name)
        if target is None and drafts:
            raise ConfigError(f"--draft is {drafts[0]} and there is no target; say --target MODEL")
        no_models = None
        if target is None:
            try:
                demo_target = demo_model("target")
                if not tables:
                    drafts = [demo_model("draft")]
                target = demo_target
            except ConfigError as error:
                no_models = Finding("models", "warning", error.message)
        task = {"target": target, "drafts": drafts, "device": device, "dtype": dtype}
        console = answer_console()
        counts = Counter[str]()
        for finding in findings_of(task, tables, host, port, grpc_port, console, no_models):
            counts[finding.state] += 1
            show(console, finding)
        console.print(f"\nproblems: {counts['problem']}, warnings: {counts['warning']}, ok: {counts['ok']}")
        if counts["problem"]:
            raise typer.Exit(EXIT_FAILED)


def findings_of(
    task: dict[str, Any],
    tables: list[str],
    host: str,
    port: int,
    grpc_port: int,
    console: Console,
    no_models: Finding | None,
) -> Iterator[Finding]:
    """Yield the findings of the checks of this machine, then those of the checks of the pair.

    task: target, drafts, device and dtype, in the form that `outrider.engine.checkup` reads. tables: labels of the
    drafters without a model. console: where the findings are printed; on a terminal a spinner is drawn below them.
    no_models: the only finding on the pair, if there is no target to check; None = there is a target.
    """
    has_engine = True
    for finding in checks(host, port, grpc_port, min(1, len(task["drafts"]))):  # each draft is checked by itself
        if finding.check == "extra engine" and finding.state == "problem":
            has_engine = False
        yield finding
    for table in tables:
        yield Finding(f"draft {table}", "ok", "needs no model: it takes the target's tokens")
    if no_models is not None:
        yield no_models
    if not has_engine:
        return  # torch is what reads the rest
    offline = {**os.environ, "HF_HUB_OFFLINE": "1"}  # a check fetches no weights
    made = run_module("outrider.engine.checkup", task, "check of the pair", grace_s=1.0, env=offline)
    templates: dict[str, Any] | None = None
    progress_console = console
    if not console.is_interactive:
        progress_console = note_console()
    try:
        with reporting(progress_console, "importing torch"), closing(made) as events:
            for event in events:
                if event["event"] == "templates":
                    templates = event
                    continue
                yield Finding(event["check"], event["state"], event["found"], event["remedy"])
    except OutriderError as error:
        yield Finding("torch", "problem", error.message, "pip check: do the libraries fit together?")
    if templates is not None:
        yield from _check_templates(templates, offline)


def _check_templates(templates: dict[str, Any], env: Mapping[str, str]) -> Iterator[Finding]:
    """Yield what the gateway finds in the target's chat templates. The command line does not import its code."""
    try:
        what = "check of the chat template"
        for event in run_module("gateway.tools.template_check", templates, what, grace_s=1.0, env=env):
            yield Finding(event["check"], event["state"], event["found"], event["remedy"])
    except OutriderError as error:
        yield Finding("chat template", "problem", error.message, "pip check: do the libraries fit together?")


def show(console: Console, finding: Finding) -> None:
    """Print a finding on one line and its remedy, if it has one, on another."""
    state = Text(f"{finding.state:<8}", STYLES[finding.state])
    console.print(Text.assemble(state, " ", (finding.check, "bold"), f": {finding.found}"))
    if finding.remedy and finding.state != "ok":
        console.print(Text(f"{'':<8} -> {finding.remedy}"))
