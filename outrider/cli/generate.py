"""`outrider generate`: one prompt, streamed, with what speculation did."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

import typer

from outrider.cli import options as opt
from outrider.cli.console import answer_console, errors_as_lines, note_console
from outrider.cli.render import AnswerPrinter, legend, summary
from outrider.client import Choice, Client, Completion, ConnectOptions, InvalidRequest, SyncRoundStream, Usage
from outrider.client.aio import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S


def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from stdin.")],
    address: opt.Address = DEFAULT_ADDRESS,
    max_tokens: opt.MaxTokens = 128,
    temperature: opt.Temperature = 1.0,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    min_p: opt.MinP = None,
    seed: opt.Seed = None,
    stop: opt.Stop = None,
    num_draft_tokens: opt.NumDraftTokens = None,
    acceptance: opt.Acceptance = None,
    drafter: opt.DrafterOption = None,
    tree: opt.Tree = None,
    lenience: opt.Lenience = None,
    no_speculation: opt.NoSpeculation = False,
    model: opt.ModelId = None,
    timeout: opt.Timeout = DEFAULT_TIMEOUT_S,
    tls: opt.Tls = False,
    tls_ca: opt.TlsCa = None,
    tls_cert: opt.TlsCert = None,
    tls_key: opt.TlsKey = None,
    api_key: opt.ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, when all is done.")] = False,
) -> None:
    """Continue PROMPT. The text goes to stdout, tokens coloured by kind; figures go to stderr."""
    with errors_as_lines():
        options = opt.generate_options(
            model=model,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            stop=stop,
            num_draft_tokens=num_draft_tokens,
            acceptance=acceptance,
            drafter=drafter,
            tree=tree,
            lenience=lenience,
            no_speculation=no_speculation,
        )
        text = _read_stdin() if prompt == "-" else prompt
        connect = ConnectOptions(tls=tls, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, api_key=api_key)
        with Client(address, timeout_s=timeout, **connect) as client:
            if as_json:
                completion = completion_json(client.generate(text, **options))
                answered = {"address": address, "model": _served(client, model), **completion}
                typer.echo(json.dumps(answered, ensure_ascii=False))
            else:
                stream = client.stream(text, **options)  # refuses bad options before anything is sent
                note_console().print(f"{_served(client, model)} at {address}", markup=False, style="dim")
                _show(stream)


def _served(client: Client, model: str | None) -> str:
    return model or ", ".join(served.id for served in client.models())


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the prompt on stdin is not UTF-8: {error}", param="prompt") from None


def _show(stream: SyncRoundStream) -> None:
    console, notes = answer_console(), note_console()
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
    """Return the fields that `--json` prints of an answer."""
    return {
        "request_id": completion.request_id,
        "choices": [_choice_json(choice) for choice in completion.choices],
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
            "num_wasted_tokens": usage.num_wasted_tokens,
            "acceptance_rate": usage.acceptance_rate,
            "mean_accepted_length": usage.mean_accepted_length,
            "tokens_per_target_pass": usage.tokens_per_target_pass,
            "seed": usage.seed,
            "lenience": usage.lenience,
        },
    }
