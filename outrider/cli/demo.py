"""`outrider demo`: the whole system once, a streamed answer, what speculation did, and that it changed nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.console import EXIT_FAILED, answer_console, note_console
from outrider.cli.demo_runs import (
    NUM_DRAFT_TOKENS,
    Arm,
    Comparison,
    DemoAnswer,
    answer,
    compare,
    read_prompts,
    run_arms,
)
from outrider.cli.progress import StartProgress, Tell, telling
from outrider.cli.render import AnswerPrinter, figure, legend
from outrider.cli.supervisor import Supervisor
from outrider.cli.up import failures_as_lines, log_to
from outrider.client import Client, Round
from outrider.wire.processes import StopFlag
from outrider.wire.settings.system import DEMO_NAME, SystemConfig, demo_model

PROMPT = 'import os\nimport sys\n\n\ndef list_files(path):\n    """Return the names of the files in path.'
_NEAR_TIE = 1e-4
"""Two logits closer than this may change places when only the order of float32 additions differs."""


def demo(
    max_tokens: Annotated[int, typer.Option(min=1, max=512, help="Output tokens of each answer.")] = 96,
    no_ray: Annotated[bool, typer.Option("--no-ray", help="Plain processes instead of Ray actors.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show every part's log.")] = False,
) -> None:
    """Start the demo pair, stream an answer, measure speculation, and compare with the target alone.

    Exit code 1 when a part could not start, or when an answer is not the target's own.
    """
    began = time.perf_counter()
    notes = note_console()
    with failures_as_lines(notes):
        settings = SystemConfig.read(_settings(no_ray))
        prompts = read_prompts(Path(demo_model("target")).parent / "prompts.jsonl")
        stop = StopFlag()
        stop.install()
        with Supervisor(settings, stop, log_to(notes, verbose, stop)) as system:
            with StartProgress(notes) as progress:
                endpoints = system.start(progress)
            with Client(endpoints.grpc) as client:
                first = _stream(client, max_tokens, stop, began)
                with telling(notes, "measuring") as tell:
                    arms = _measure(client, prompts, max_tokens, stop, tell)
                    tell("asking transformers' generate for the same answers")
                    answers = [first, *arms[0].answers, *arms[1].answers]
                    comparison = compare(settings.targets[0].worker.model, max_tokens, answers, stop)
        report(arms, comparison)
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


def _stream(client: Client, max_tokens: int, stop: StopFlag, began: float) -> DemoAnswer:
    """Print the prompt's answer as it comes, then the seconds from `began` (perf_counter) to its first token."""
    console = answer_console()
    first_token_s: list[float] = []
    printer = AnswerPrinter(console)

    def show(round_: Round) -> None:
        if round_.tokens and not first_token_s:
            first_token_s.append(time.perf_counter() - began)
        printer.show(round_)

    console.print()
    console.print(legend())
    console.print(PROMPT, style="bold", end="", markup=False)
    made = answer(client, PROMPT, max_tokens, stop, speculation=True, show=show)
    printer.end()
    console.print(f"\nstart to first token: {first_token_s[0]:.1f} s")
    return made


def _measure(client: Client, prompts: list[str], max_tokens: int, stop: StopFlag, tell: Tell) -> tuple[Arm, Arm]:
    num_done = 0

    def done() -> None:
        nonlocal num_done
        num_done += 1
        tell(f"measuring: {num_done} of {2 * len(prompts)} answers, with and without speculation in turn")

    return run_arms(client, prompts, max_tokens, stop, done)


def report(arms: tuple[Arm, Arm], comparison: Comparison) -> None:
    console = answer_console()
    with_speculation, plain = arms
    usage = with_speculation.usage
    speedup = with_speculation.tokens_per_s / plain.tokens_per_s
    rate = f"{figure(usage.acceptance_rate)} ({usage.num_accepted_tokens}/{usage.num_draft_tokens})"
    console.print(
        f"\n{len(plain.answers)} prompts, greedy, one at a time, {NUM_DRAFT_TOKENS} drafts a round or none, in turn:"
    )
    console.print(f"  acceptance rate: {rate}")
    console.print(f"  mean accepted length: {figure(usage.mean_accepted_length)}")
    console.print(f"  tokens per target pass: {figure(usage.tokens_per_target_pass)}")
    console.print(f"  tokens/s with speculation: {with_speculation.tokens_per_s:.1f}")
    console.print(f"  tokens/s without speculation: {plain.tokens_per_s:.1f} ({speedup:.2f}x with)")
    for difference in comparison.differences:
        near = ", a near-tie" if difference["top2_gap"] < _NEAR_TIE else ""
        console.print(
            f"  answer {difference['answer']} differs at position {difference['position']}: token "
            f"{difference['found']}, the target alone says {difference['expected']}; "
            f"its two best logits are {difference['top2_gap']:.2g} apart{near}"
        )
    verdict = "no" if comparison.differences else "yes"
    console.print(
        f"matches target alone: {verdict} ({comparison.num_answers} answers, {comparison.num_tokens} tokens, "
        "against transformers' generate in another process)"
    )
