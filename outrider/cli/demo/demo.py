"""`outrider demo`: runs the whole system once, measures three ways to draft, and proves the text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from outrider.cli.console import EXIT_FAILED, answer_console, note_console
from outrider.cli.demo.demo_parts import REPETITION_PENALTY, DemoPart, parts
from outrider.cli.demo.demo_runs import (
    REFERENCE_TIMEOUT_S,
    Comparison,
    DemoOutput,
    DemoRequests,
    Measurement,
    compare,
    measure,
)
from outrider.cli.generate.render import AnswerPrinter, figure, legend
from outrider.cli.progress import StartProgress, reporting
from outrider.cli.up.supervisor import Supervisor
from outrider.cli.up.up import failures_as_lines, log_to
from outrider.client import Client
from outrider.wire.processes.stop_flag import StopFlag
from outrider.wire.settings.system import DEMO_NAME, SystemConfig, demo_model

_NEAR_TIE = 1e-4
"""Difference of two logits below which the order of float32 additions may decide which of them is larger."""


def demo(
    max_tokens: Annotated[int, typer.Option(min=1, max=512, help="Output tokens of each answer.")] = 96,
    no_ray: Annotated[bool, typer.Option("--no-ray", help="Plain processes instead of Ray actors.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every part's log.")] = False,
) -> None:
    """Start the demo pair, show three ways to draft, compare each with plain decoding, and check every output.

    Each output must be the text that the target generates alone. The exit code is 1 if one is not, or if a part could
    not start.
    """
    began = time.perf_counter()
    notes = note_console()
    with failures_as_lines(notes):
        settings = SystemConfig.read(_settings(no_ray))
        shown = parts()
        measured = list[Measurement]()
        stop = StopFlag()
        stop.install()
        with Supervisor(settings, stop, log_to(notes, verbose, stop)) as system:
            with StartProgress(notes) as progress:
                endpoints = system.start(progress)
            console = answer_console()
            console.print(f"\nready after {time.perf_counter() - began:.0f} s. ", end="")
            console.print(legend())
            with Client(endpoints.grpc) as client:
                asking = DemoRequests(client, max_tokens, REPETITION_PENALTY, stop)
                for number, part in enumerate(shown, start=1):
                    measured.append(_show(asking, number, part))
        answers = _answers_of(measured)
        notes.print(
            "\nThe proof: transformers' generate makes the same answers in another process, without drafts; "
            f"about a minute, {REFERENCE_TIMEOUT_S / 60:g} at most"
        )
        with reporting(notes, "comparing"):
            comparison = compare(settings.target_pools[0].worker.model, max_tokens, REPETITION_PENALTY, answers, stop)
        report(shown, measured, comparison)
        console.print(f"{time.perf_counter() - began:.0f} s in all")
        if comparison.differences:
            raise typer.Exit(EXIT_FAILED)


def _settings(no_ray: bool) -> dict[str, object]:
    ray: dict[str, object] | None = {}
    if no_ray:
        ray = None
    return {
        # float32: the comparison needs the bits of transformers' own forward
        "target": {"model": demo_model("target"), "dtype": "float32"},
        "draft": {"model": demo_model("draft"), "dtype": "float32"},
        "gateway": {"port": 0, "grpc_port": 0, "model_name": DEMO_NAME},
        "ray": ray,
    }


def _show(asking: DemoRequests, number: int, part: DemoPart) -> Measurement:
    _print_first_answer(asking, number, part)
    notes = note_console()
    per_prompt = []
    with reporting(notes, "measuring") as show_message:
        for index, prompt in enumerate(part.prompts, start=1):
            per_prompt.append(measure(asking, prompt, part.speculation, part.before))
            if notes.is_terminal:
                show_message(f"measuring: {index} of {len(part.prompts)} prompts, with drafts and without in turn")
    measured = Measurement(per_prompt)
    answer_console().print(f"   {_speed(measured)}")
    return measured


def _print_first_answer(asking: DemoRequests, number: int, part: DemoPart) -> None:
    console = answer_console()
    console.print(f"\n{number}. {part.title}: {part.description}", style="bold")
    prompt = part.prompts[0]
    plain = asking.answer(prompt, False)
    console.print(prompt, style="dim", end="")
    printer = AnswerPrinter(console)
    prediction = None
    if part.before is not None:
        prediction = part.before(plain.text)
    asking.answer(prompt, part.speculation, prediction, printer.show)
    printer.end()


def _speed(measured: Measurement) -> str:
    low = measured.speedups[0]
    high = measured.speedups[-1]
    return (
        f"{measured.speedup:.2f} times as fast as without drafts (median of {len(measured.per_prompt)} prompts, "
        f"{low:.2f} to {high:.2f}), {figure(measured.usage.tokens_per_target_pass)} tokens for each pass of the target"
    )


def report(shown: Sequence[DemoPart], measured: Sequence[Measurement], comparison: Comparison) -> None:
    """Print a table of the ways to draft, a reason for each way that does not pay on this machine, and whether every
    output is the one that the target generates alone.

    shown, measured: the ways to draft and their measurements, in the same order. comparison: result of comparing all
    outputs with those of transformers.
    """
    console = answer_console()
    answers = _answers_of(measured)
    wrong = {id(answers[difference["answer"]]) for difference in comparison.differences}
    table = Table(box=None, pad_edge=False)
    table.add_column("drafts by", no_wrap=True)
    for name in ("over plain", "accepted", "tokens/pass", "the target's text"):
        table.add_column(name, justify="right", no_wrap=True)
    for part, own in zip(shown, measured, strict=True):
        usage = own.usage
        accepted = f"{figure(usage.acceptance_rate)} ({usage.num_accepted_tokens}/{usage.num_draft_tokens})"
        num_wrong = len(wrong.intersection(map(id, own.answers)))
        right = f"{len(own.answers) - num_wrong} of {len(own.answers)}"
        table.add_row(part.title, f"{own.speedup:.2f}x", accepted, figure(usage.tokens_per_target_pass), right)
    console.print()
    console.print(table)
    for part, own in zip(shown, measured, strict=True):
        if own.speedup < 1:
            console.print(f"\n{part.title} does not pay on this machine: {_why_not(own)}")
    for difference in comparison.differences:
        text = (
            f"  answer {difference['answer']} differs at position {difference['position']}: token "
            f"{difference['found']}, the target alone has {difference['expected']}; "
            f"its two best logits are {difference['top2_gap']:.2g} apart"
        )
        if difference["top2_gap"] < _NEAR_TIE:
            text += ", a near-tie"
        console.print(text)
    verdict = "yes"
    if comparison.differences:
        verdict = "no"
    console.print(
        f"\nmatches target alone: {verdict} ({comparison.num_answers} answers, {comparison.num_tokens} tokens, "
        "against transformers' generate in another process)"
    )


def _answers_of(measured: Sequence[Measurement]) -> list[DemoOutput]:
    answers = list[DemoOutput]()
    for own in measured:
        answers += own.answers
    return answers


def _why_not(measured: Measurement) -> str:
    return (
        f"a round with drafts takes {measured.round_cost:.1f} times as long as a plain step, and makes "
        f"{figure(measured.usage.tokens_per_target_pass)} tokens. The target is so small that its draft costs nearly "
        "as much. With a target that is dearer, or a draft on a device of its own, a round costs little more than a "
        "step. K auto, the default, drafts nothing where it does not pay."
    )
