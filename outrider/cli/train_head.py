"""`outrider train-head`: trains a draft head or a draft model for a target, on text that the target generates."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from outrider.cli.console import answer_console, errors_as_lines, note_console
from outrider.cli.demo.demo_runs import first_prompts, read_prompts
from outrider.cli.progress import StageProgress
from outrider.cli.up.child_events import run_module
from outrider.lab.alpha import format_estimate
from outrider.wire.errors import ConfigError
from outrider.wire.models.model_id import local_folder
from outrider.wire.requests.params import ANY_VOCABULARY, SamplingParams

KINDS = ("eagle3", "medusa", "pass", "draft")
LOSSES = ("kl", "lk")
DEPTHS = {"eagle3": 3, "medusa": 4, "pass": 4, "draft": 1}
"""Default of --depth for each kind: number of draft tokens of one proposal that are trained. It is 1 for a draft model,
which makes every draft token by the same forward."""
HELD_APART = 48
"""Maximum number of prompts on which acceptance is measured. With 48 prompts the confidence intervals of the acceptance
are narrow enough to compare two trainings."""
STOP_S = 60.0
"""Seconds within which a training must finish its present update and save it, after it was asked to stop."""
HELD_APART_OF = 8
"""If --held-apart is absent, one of every 8 prompts is held apart: it is not trained on, and acceptance is measured on
it."""

Kind = Annotated[str, typer.Argument(help=f"What to train: {', '.join(KINDS)}.", show_default=False)]
Target = Annotated[str, typer.Option(help="Folder with the target's model.", show_default=False)]
Out = Annotated[
    Path, typer.Option(help="Folder to write the trained head, embeddings or draft into.", show_default=False)
]
Work = Annotated[
    Path,
    typer.Option(
        help="Folder that keeps the text that the target writes, which later trainings use again, and checkpoints, "
        "from which an interrupted training continues.",
        show_default=False,
    ),
]
Prompts = Annotated[
    Path,
    typer.Option(
        help="Prompts that the target continues, for text to train on: JSONL with a `prompt` in each line (*.jsonl), "
        "or a text with one in each line. Those that share 50 characters with a prompt held apart are left out.",
        show_default=False,
    ),
]
HeldApart = Annotated[
    Path | None,
    typer.Option(
        help="JSONL of prompts on which acceptance is measured, the first 48; absent = every eighth prompt of "
        "--prompts, at most 48."
    ),
]
Start = Annotated[
    str | None,
    typer.Option(
        help="Folder of a draft model with the target's tokenizer. `draft`: continue its training. `eagle3`: "
        "give the head that model's shape, embedding and lm_head; absent = those of the target."
    ),
]
Depth = Annotated[
    int | None,
    typer.Option(
        help="Number of draft tokens to train for: eagle3's steps of training-time test (3), Medusa's heads (4), or "
        "pass's look-ahead embeddings (4)."
    ),
]
Taps = Annotated[
    str | None,
    typer.Option(
        help="Hidden states of the target that eagle3 reads, such as 1,3,5: k is the input of the target's layer k, "
        "from 0. Absent = those of an early, a middle and a late layer."
    ),
]


def train_head(
    kind: Kind,
    *,
    target: Target,
    out: Out,
    work: Work,
    prompts: Prompts,
    held_apart: HeldApart = None,
    start: Start = None,
    loss: Annotated[
        str, typer.Option(help="kl (divergence), or lk (moves from kl to acceptance as acceptance rises).")
    ] = "lk",
    depth: Depth = None,
    taps: Taps = None,
    draft_vocab: Annotated[int | None, typer.Option(help="Number of token ids that eagle3 can propose.")] = None,
    updates: Annotated[int, typer.Option(help="Number of updates, over which the learning rate falls.")] = 1000,
    batch_size: Annotated[int, typer.Option(help="Number of answers per update. Memory grows with it.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Maximum tokens that the target writes per prompt.")] = 256,
    num_prompts: Annotated[int, typer.Option(help="Maximum number of prompts to use, from the first.")] = 4096,
    temperature: Annotated[
        list[float] | None,
        typer.Option(
            help="Temperature at which the target writes. If given several times, prompts take them in turn; absent = "
            "0, 0.7 and 1."
        ),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="Stop the training after this time; the same command continues it.")
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Use each prompt as it stands, even if the target has a chat template.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the text, of its order and of the initial weights.")] = 0,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of a table.")] = False,
) -> None:
    """Train a draft head (EAGLE-3, Medusa), look-ahead embeddings (PaSS) or a draft model on text that the target
    writes.

    The target continues the prompts, each in the target's chat template if there is one. The training brings the
    draft's distribution after each token close to the target's. Ctrl-C saves the training. The same command then
    continues it and, on a CPU, reaches the same weights as without an interruption. At the end the acceptance of each
    draft token is printed, before and after the training, on prompts that were not trained on.
    """
    with errors_as_lines():
        trained_on, apart = _split(_prompts(prompts)[:num_prompts], held_apart)
        task = {
            "kind": _one_of("KIND", kind, KINDS),
            "target": target,
            "out": str(out),
            "work": str(work),
            "prompts": trained_on,
            "held_apart": apart,
            "temperatures": temperature or [0.0, 0.7, 1.0],
            "start": start,
            "loss": _one_of("--loss", loss, LOSSES),
            "depth": depth or DEPTHS[kind],
            "taps": _numbers(taps),
            "draft_vocab": draft_vocab,
            "updates": updates,
            "batch_size": batch_size,
            "max_tokens": max_tokens,
            "seed": seed,
            "seconds": seconds,
            "device": device,
            "raw": raw,
        }
        _check(task, num_prompts, depth)
        if held_apart is None:
            notes = note_console()
            notes.print(f"{len(apart)} of {len(trained_on) + len(apart)} prompts are held apart, to measure on")
        report = train(task, note_console())
        if report is None:  # its process was asked to stop
            note_console().print(describe_stop(work))
        elif as_json:
            typer.echo(json.dumps(report))
        else:
            show(report, out, answer_console())


def train(task: dict[str, Any], notes: Console) -> dict[str, Any] | None:
    """Train in a child process, which imports torch, and return the training's report. None = the training was stopped.

    task: the task that `outrider.training.train_head` reads. notes: console for the progress. Raises OutriderError if
    the training fails. On KeyboardInterrupt it waits until the child process has saved its work.
    """
    report = None
    found = run_module("outrider.training.train_head", task, "training", STOP_S)
    try:
        with StageProgress(notes) as progress, closing(found) as events:
            for event in events:
                if event["event"] == "progress" and event["stage"] == "estimate":
                    notes.print(event["text"])
                elif event["event"] == "progress":
                    progress.show(event["stage"], event["text"], event["done"], event["total"])
                elif event["event"] == "trained":
                    report = event["report"]
    except KeyboardInterrupt:
        notes.print(describe_stop(Path(task["work"])))
        raise
    return report


def describe_stop(work: Path) -> str:
    """Return a sentence that says whether a stopped training can continue from what is in its folder `work`."""
    if any(work.glob("text-*/*.npz")) or any(work.glob("*/checkpoint.pt")):
        return "stopped; the same command goes on from here"
    return "stopped before anything was written; the same command begins anew"


def show(report: dict[str, Any], out: Path, console: Console) -> None:
    """Print the report of a training: the acceptance probability of each draft token, and the cost of the training.

    out: folder of the trained head.
    """
    rows = report["acceptance"]
    depths = sorted({row["depth"] for row in rows})
    table = Table(title="acceptance of each draft token", title_justify="left", box=None, pad_edge=False)
    for name in ("temperature", ""):
        table.add_column(name)
    for depth in depths:
        table.add_column(f"token {depth}", justify="right", no_wrap=True)
    lines = dict[tuple[float, str], dict[int, str]]()
    for row in sorted(rows, key=lambda row: float(row["temperature"])):
        cells = lines.setdefault((row["temperature"], row["drafter"]), {})
        cells[row["depth"]] = format_estimate(row["mean"], row["error"])
    for (temperature, drafter), cells in lines.items():
        table.add_row(f"{temperature:g}", drafter, *(cells.get(depth, "-") for depth in depths))
    console.print(table)
    text = (
        f"{out}: {report['updates_done']} updates on {report['num_tokens']} tokens of the target in "
        f"{report['seconds']} s of training, {report['peak_bytes'] / 2**20:.0f} MiB of memory at most"
    )
    num_remaining = report["updates"] - report["updates_done"]
    if num_remaining:
        text += f"; {num_remaining} updates are left, which the same command makes"
    console.print(text)
    console.print(
        "Acceptance: the sum of min(target, draft) after draft tokens that were accepted; at temperature 0 how often "
        "both have the same best token. After ± the 95 % interval over prompts. draft: of --start.",
        style="dim",
    )


def _split(texts: list[str], held_apart: Path | None) -> tuple[list[str], list[str]]:
    """Return (prompts to train on, prompts to measure acceptance on). The latter are from the file `held_apart`, or
    some of `texts` if it is None.
    """
    if held_apart is not None:
        return texts, first_prompts(held_apart, HELD_APART)
    if len(texts) < 2:
        raise ConfigError(f"--prompts has {len(texts)} prompts; two are the least, of which one is to measure on")
    apart = texts[::HELD_APART_OF][:HELD_APART]
    chosen = set(apart)
    return [text for text in texts if text not in chosen], apart


def _prompts(path: Path) -> list[str]:
    if path.suffix == ".jsonl":
        return read_prompts(path)
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read prompts from {path}: {error}") from None


def _numbers(text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--taps is {text!r}, must be whole numbers with commas, such as 1,3,5") from None


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ConfigError(f"{name} is {value!r}, must be one of {', '.join(choices)}")
    return value


def _check(task: dict[str, Any], num_prompts: int, depth: int | None) -> None:
    """Raise ConfigError for a wrong value, and for an option that the kind of head does not have."""
    kind = task["kind"]
    counts = {
        "num-prompts": num_prompts,
        "updates": task["updates"],
        "batch-size": task["batch_size"],
        "max-tokens": task["max_tokens"],
    }
    if depth is not None:
        counts["depth"] = depth
    for name, value in counts.items():
        if value < 1:
            raise ConfigError(f"--{name} is {value}, must be at least 1")
    if task["seconds"] is not None and not task["seconds"] > 0:
        raise ConfigError(f"--seconds is {task['seconds']}, must be above 0")
    for name in ("target", "start"):
        if task[name] is not None and local_folder(task[name]) is None:
            raise ConfigError(
                f"--{name} is {task[name]!r}, and there is no such folder; training needs a model's files"
            )
    for temperature in task["temperatures"]:
        SamplingParams(temperature=temperature).check(ANY_VOCABULARY)
    if kind == "draft" and task["start"] is None:
        raise ConfigError("a draft is trained on from one that is there: name it with --start")
    of_eagle3 = ("taps", "draft_vocab")
    refused = {"eagle3": (), "medusa": (*of_eagle3, "start"), "pass": (*of_eagle3, "start"), "draft": of_eagle3}
    for name in refused[kind]:
        if task[name] is not None:
            raise ConfigError(f"--{name.replace('_', '-')} does not apply to {kind}; leave it out")
    if kind == "draft" and depth is not None:
        raise ConfigError("--depth does not apply to a draft, which drafts any number of tokens; leave it out")
