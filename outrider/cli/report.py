"""`outrider report`: what this machine's GPUs make of a pair, in one file to send back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli import options as opt
from outrider.cli.console import EXIT_FAILED, answer_console, errors_as_lines, note_console
from outrider.cli.progress import telling
from outrider.cli.reporting.document import Document
from outrider.cli.reporting.pair import ON_GPUS, REHEARSAL, PairReport, devices_here
from outrider.cli.reporting.sections import State
from outrider.cli.tuning.deployments import Workers
from outrider.wire.errors import ConfigError
from outrider.wire.processes import Event
from outrider.wire.settings.system import TABLE_DRAFTERS, flag_of

EXIT_NO_GPU = 3


@opt.grouped
def report(
    *,
    target: Annotated[
        str | None, typer.Option(help="Folder or hub id of the target; absent = the demo pair, widened.")
    ] = None,
    draft: Annotated[str | None, typer.Option(help="Folder or hub id of the draft, a model.")] = None,
    placement: opt.PlacementOptions,
    out: Annotated[Path, typer.Option(help="Markdown file to write; a JSON file is written beside it.")] = Path(
        "outrider-report.md"
    ),
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="Run it all on the CPU, a little of each; the figures say nothing.")
    ] = False,
) -> None:
    """Measure a pair on this machine's GPUs, and write what came of it into one file to send back.

    Versions, doctor's findings, the laws of sampling in short, self-tests, CUDA graphs, steps against the memory's
    speed, and the pair served on two GPUs and on one, with drafts and without. What fails is told, and the rest goes
    on; Ctrl-C leaves what there is. Without a GPU it says what it would run (exit code 3).
    """
    notes = note_console()
    with errors_as_lines():
        if out.suffix != ".md" or not out.absolute().parent.is_dir():
            raise ConfigError(f"--out is {out}, must be a file *.md in a folder that is there")
        if draft is not None and draft.partition(":")[0] in TABLE_DRAFTERS:
            raise ConfigError(f"--draft {draft} is no model: the report is of a pair of models on devices")
        workers = placement.workers(target, draft)
        if rehearse:
            _check_nothing_placed(workers)
        with telling(notes, "importing torch"):
            devices = devices_here()
        num_gpus = len(devices["gpus"])
        _place(workers, 0 if rehearse else num_gpus or 2)
        is_widened = target is None and draft is None and not rehearse
        pair = PairReport(workers, is_widened, REHEARSAL if rehearse else ON_GPUS, devices, notes)
        sections = pair.sections()
        if not num_gpus and not rehearse:
            console = answer_console()
            console.print("torch sees no GPU here. On a machine with two this would run:\n")
            for section in sections:
                console.print(f"{section.title}: {section.plan}")
            console.print("\nOn the CPU, to see that it runs: outrider report --rehearse")
            raise typer.Exit(EXIT_NO_GPU)
        document = Document(out, _head(devices, rehearse, is_widened, pair.without_split), sections)
        _run(document)
        failed = [section.title for section in sections if section.state is State.FAILED]
        if failed:
            notes.print(f"failed, and told there: {', '.join(failed)}")
            raise typer.Exit(EXIT_FAILED)


def _run(document: Document) -> None:
    """Carry out all sections. Raises KeyboardInterrupt, with what there is written."""
    notes = note_console()
    try:
        for section in document.sections:
            notes.print(f"{section.title} ...")
            section.carry_out()
            document.write()
            notes.print(f"{section.title}: {section.state.value}, {section.elapsed_s:.0f} s")
    finally:
        document.write()
        notes.print(f"written: {document.path} and {document.json_path}")


def _check_nothing_placed(workers: Workers) -> None:
    given = [flag_of(role, "device") for role, values in workers.items() if values["device"] is not None]
    if given:
        raise ConfigError(f"--rehearse and {given[0]} contradict each other: a rehearsal runs on the CPU")


def _place(workers: Workers, num_gpus: int) -> None:
    """Give the workers that have none a device: the target the first, the draft the second where there is one."""
    for index, role in enumerate(("target", "draft")):
        if workers[role]["device"] is None:
            workers[role]["device"] = f"cuda:{min(index, num_gpus - 1)}" if num_gpus else "cpu"


def _head(devices: Event, rehearse: bool, is_widened: bool, without_split: str | None) -> str:
    if rehearse:
        said = "**A REHEARSAL ON THE CPU: its figures are of a CPU and of little of each, and say nothing of a GPU.**"
    else:
        said = f"On {' and '.join(gpu['name'] for gpu in devices['gpus'])}."
    if is_widened:
        said += " The pair is the demo pair WIDENED: its text and acceptance at the cost of larger models."
    return said if without_split is None else f"{said}\n\nNot on two devices: {without_split}"
