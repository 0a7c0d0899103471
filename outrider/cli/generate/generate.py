"""`outrider generate`: sends one prompt and prints the streamed output, with figures of its speculation."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.cli import options as opt
from outrider.cli.console import answer_console, errors_as_lines, note_console
from outrider.cli.generate.render import AnswerPrinter, legend, served_ids, summary
from outrider.client import Choice, Client, Completion, InvalidRequest, SyncRoundStream, Usage
from outrider.client.aio import DEFAULT_ADDRESS


@opt.grouped
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from stdin.")],
    address: opt.Address = DEFAULT_ADDRESS,
    max_tokens: opt.MaxTokens = 128,
    *,
    generation: opt.Generation,
    connection: opt.CallOptions,
    prediction: Annotated[
        Path | None,
        typer.Option(help="Text file that the answer may repeat in parts, such as before an edit; drafts copy it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, when all is done.")] = False,
) -> None:
    """Continue PROMPT. The text goes to stdout, tokens coloured by kind; figures go to stderr."""
    with errors_as_lines():
        options = generation.options(connection.model, max_tokens)
        if prediction is not None:
            options["prediction"] = _read_prediction(prediction)
        text = prompt
        if prompt == "-":
            text = _read_stdin()
        with Client(address, timeout_s=connection.timeout, **connection.options) as client:
            if as_json:
                completion = completion_json(client.generate(text, **options))
                answered = {"address": address, "model": _served(client, connection.model), **completion}
                typer.echo(json.dumps(answered, ensure_ascii=False))
            else:
                stream = client.stream(text, **options)  # refuses bad options before anything is sent
                note_console().print(f"{_served(client, connection.model)} at {address}", markup=False, style="dim")
                _show(stream)


def _served(client: Client, model: str | None) -> str:
    return model or served_ids(client)


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the prompt on stdin is not UTF-8: {error}", param="prompt") from None


def _read_prediction(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"--prediction {path} cannot be read: {error}", param="prediction") from None


def _show(stream: SyncRoundStream) -> None:
    console = answer_console()
    notes = note_console()
    if console.is_terminal:
        notes.print(legend())
    printer = AnswerPrinter(console)
    usage: Usage | None = None
    started = time.perf_counter()
    first_token_s = 0.0
    try:
        with stream as rounds:
            for round_ in rounds:
                first_token_s = first_token_s or time.perf_counter() - started
                printer.show(round_)
                usage = round_.usage or usage
    finally:
        printer.end()
    if usage is not None:
        notes.print(summary(usage, time.perf_counter() - started, first_token_s), style="dim")


def completion_json(completion: Completion) -> dict[str, Any]:
    """Return the JSON object that `--json` prints for a completion."""
    return {
        "request_id": completion.request_id,
        "choices": list(map(_choice_json, completion.choices)),
    }


def _choice_json(choice: Choice) -> dict[str, Any]:
    usage = choice.usage
    return {
        "index": choice.index,
        "text": choice.text,
        "finish_reason": choice.finish_reason.value,
        "stop_reason": choice.stop_reason,
        "tokens": [{"id": token.id, "kind": token.kind.value, "text": token.text} for token in choice.tokens],
        "usage": {
            "num_prompt_tokens": usage.num_prompt_tokens,
            "num_cached_prompt_tokens": usage.num_cached_prompt_tokens,
            "num_completion_tokens": usage.num_completion_tokens,
            "num_rounds": usage.num_rounds,
            "num_draft_tokens": usage.num_draft_tokens,
            "num_accepted_tokens": usage.num_accepted_tokens,
            "num_plain_steps": usage.num_plain_steps,
            "plain_reason": usage.plain_reason,
            "num_wasted_tokens": usage.num_wasted_tokens,
            "num_accepted_prediction_tokens": usage.num_accepted_prediction_tokens,
            "num_rejected_prediction_tokens": usage.num_rejected_prediction_tokens,
            "acceptance_rate": usage.acceptance_rate,
            "mean_accepted_length": usage.mean_accepted_length,
            "mean_emitted_length": usage.mean_emitted_length,
            "tokens_per_target_pass": usage.tokens_per_target_pass,
            "seed": usage.seed,
            "lenience": usage.lenience,
        },
    }
