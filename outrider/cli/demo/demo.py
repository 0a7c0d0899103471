"""`outrider demo`: the whole system once, three ways to draft, how fast each is here, and the proof of the text."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from outrider.cli.console import EXIT_FAILED, answer_console, note_console
from outrider.cli.demo.demo_parts import REPETITION_PENALTY, Part, parts
from outrider.cli.demo.demo_runs import REFERENCE_TIMEOUT_S, Asking, Comparison, DemoAnswer, Measured, compare, measure
from outrider.cli.generate.render import AnswerPrinter, figure, legend
from outrider.cli.progress import StartProgress, telling
from outrider.cli.up.supervisor import Supervisor
from outrider.cli.up.up import failures_as_lines, log_to
from outrider.client import Client
from outrider.wire.processes.processes import StopFlag
from outrider.wire.settings.system import DEMO_NAME, SystemConfig, demo_model

_NEAR_TIE = 1e-4
"""Two logits closer than this may change places when only the order of float32 additions differs."""


def demo(
    max_tokens: Annotated[int, typer.Option(min=1, max=512, help="Output tokens of each answer.")] = 96,
    no_ray: Annotated[bool, typer.Option("--no-ray", help="Plain processes instead of Ray actors.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every part's log.")] = False,
) -> None:
    """Start the demo pair, show three ways to draft, measure each beside plain decoding, and prove the text.

    Exit code 1 when a part could not start, or when an answer is not the target's own.
    """
    began = time.perf_counter()
    notes = note_console()
    with failures_as_lines(notes):
        settings = SystemConfig.read(_settings(no_ray))
        shown = parts()
        stop = StopFlag()
        stop.install()
        with Supervisor(settings, stop, log_to(notes, verbose, stop)) as system:
            with StartProgress(notes) as progress:
                endpoints = system.start(progress)
            console = answer_console()
            console.print(f"\nready after {time.perf_counter() - began:.0f} s. ", end="")
            console.print(legend())
            with Client(endpoints.grpc) as client:
                asking = Asking(client, max_tokens, REPETITION_PENALTY, stop)
                measured = [_show(asking, number, part) for number, part in enumerate(shown, start=1)]
        answers = [answer for each in measured for answer in each.answers]
        notes.print(
            "\nThe proof: transformers' generate makes the same answers in another process, without drafts; "
            f"about a minute, {REFERENCE_TIMEOUT_S / 60:g} at most"
        )
        with telling(notes, "comparing"):
            comparison = compare(settings.targets[0].worker.model, max_tokens, REPETITION_PENALTY, answers, stop)
        report(shown, measured, comparison)
        console.print(f"{time.perf_counter() - began:.0f} s in all")
        if comparison.differences:
            raise typer.Exit(EXIT_FAILED)


def _settings(no_ray: bool) -> dict[str, object]:
    """Return settings with any free ports, since nobody else calls, and float32, which the comparison needs."""
    return {
        "target": {"model": demo_model("target"), "dtype": "float32"},
        "draft": {"model": demo_model("draft"), "dtype": "float32"},
        "gateway": {"port": 0, "grpc_port": 0, "model_name": DEMO_NAME},
        "ray": None if no_ray else {},
    }


def _show(asking: Asking, number: int, part: Part) -> Measured:
    """Print the first prompt's answer as it comes, then measure all of the part's."""
    console, notes = answer_console(), note_console()
    console.print(f"\n{number}. {part.title}: {part.says}", style="bold")
    prompt = part.prompts[0]
    plain = asking.answer(prompt, False)
    console.print(prompt, style="dim", end="")
    printer = AnswerPrinter(console)
    asking.answer(prompt, part.speculation, None if part.before is None else part.before(plain.text), printer.show)
    printer.end()
    pairs = []
    with telling(notes, "measuring") as tell:
        for index, each in enumerate(part.prompts, start=1):
            pairs.append(measure(asking, each, part.speculation, part.before))
            if notes.is_terminal:
                tell(f"measuring: {index} of {len(part.prompts)} prompts, with drafts and without in turn")
    measured = Measured(pairs)
    console.print(f"   {_speed(measured)}")
    return measured


def _speed(measured: Measured) -> str:
    low, high = measured.speedups[0], measured.speedups[-1]
    return (
        f"{measured.speedup:.2f} times as fast as without drafts (median of {len(measured.pairs)} prompts, "
        f"{low:.2f} to {high:.2f}), {figure(measured.usage.tokens_per_target_pass)} tokens for each pass of the target"
    )


def report(shown: Sequence[Part], measured: Sequence[Measured], comparison: Comparison) -> None:
    """Print the table, what does not pay here and why, and the proof."""
    console = answer_console()
    answers = [answer for each in measured for answer in each.answers]
    wrong = {id(answers[difference["answer"]]) for difference in comparison.differences}
    table = Table(box=None, pad_edge=False)
    for name in ("drafts by", "over plain", "accepted", "tokens/pass", "the target's text"):
        table.add_column(name, justify="left" if name == "drafts by" else "right", no_wrap=True)
    for part, each in zip(shown, measured, strict=True):
        usage = each.usage
        accepted = f"{figure(usage.acceptance_rate)} ({usage.num_accepted_tokens}/{usage.num_draft_tokens})"
        is_own = _is_own(each.answers, wrong)
        table.add_row(part.title, f"{each.speedup:.2f}x", accepted, figure(usage.tokens_per_target_pass), is_own)
    console.print()
    console.print(table)
    for part, each in zip(shown, measured, strict=True):
        if each.speedup < 1:
            console.print(f"\n{part.title} does not pay on this machine: {_why_not(each)}")
    for difference in comparison.differences:
        near = ", a near-tie" if difference["top2_gap"] < _NEAR_TIE else ""
        console.print(
            f"  answer {difference['answer']} differs at position {difference['position']}: token "
            f"{difference['found']}, the target alone says {difference['expected']}; "
            f"its two best logits are {difference['top2_gap']:.2g} apart{near}"
        )
    verdict = "no" if comparison.differences else "yes"
    console.print(
        f"\nmatches target alone: {verdict} ({comparison.num_answers} answers, {comparison.num_tokens} tokens, "
        "against transformers' generate in another process)"
    )


def _is_own(answers: Sequence[DemoAnswer], wrong: set[int]) -> str:
    num_own = sum(id(answer) not in wrong for answer in answers)
    return f"{num_own} of {len(answers)}"


def _why_not(measured: Measured) -> str:
    """Say what a round costs and brings."""
    return (
        f"a round with drafts takes {measured.round_cost:.1f} times as long as a plain step, and makes "
        f"{figure(measured.usage.tokens_per_target_pass)} tokens. The target is so small that its draft costs nearly "
        "as much. With a target that is dearer, or a draft on a device of its own, a round costs little more than a "
        "step. K auto, the default, drafts nothing where it does not pay."
    )
