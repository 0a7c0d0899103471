"""The options that `generate` and `chat` share, and the SDK arguments they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.client import AcceptanceRule, Drafter, GenerateOptions, Speculation
from outrider.client.connect import KEY_VARIABLE
from outrider.wire.params import AUTO, DraftTokens, read_draft_tokens

Address = Annotated[str, typer.Option(help="host:port of a gateway's gRPC server.")]
Tls = Annotated[bool, typer.Option("--tls", help="Connect with TLS; implied by the options that follow.")]
TlsCa = Annotated[Path | None, typer.Option(help="PEM file of the CAs to trust; absent = the system's.")]
TlsCert = Annotated[Path | None, typer.Option(help="PEM file with a certificate to show; needs --tls-key.")]
TlsKey = Annotated[Path | None, typer.Option(help="PEM file with its key.")]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar=KEY_VARIABLE, show_envvar=True, help="API key; better in the environment, where `ps` shows none."
    ),
]
ModelId = Annotated[str | None, typer.Option("--model", help="A served model's id; absent = the only one.")]
MaxTokens = Annotated[int, typer.Option(help="Largest number of output tokens.")]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option(help="Keep the smallest set of tokens with this mass.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k most likely tokens.")]
MinP = Annotated[float | None, typer.Option(help="Keep tokens with this share of the best one's probability.")]
Seed = Annotated[int | None, typer.Option(help="Key of the draws; absent = another one each time.")]
Stop = Annotated[list[str] | None, typer.Option(help="String that ends the output; may be given several times.")]
NumDraftTokens = Annotated[
    str | None,
    typer.Option(
        "--num-draft-tokens",
        "-K",
        metavar="N|auto",
        help="Tokens drafted a round, or auto: as many as pay; absent = the server's default.",
    ),
]
Acceptance = Annotated[
    AcceptanceRule | None,
    typer.Option(help="Which drafts are kept at temperature > 0; absent = the server's default."),
]
DrafterOption = Annotated[
    Drafter | None,
    typer.Option("--drafter", help="Who guesses what comes next; absent = the server's default."),
]
Tree = Annotated[
    str | None,
    typer.Option(help="Draft a tree: children by depth, 4x2x1, or best:12x4, nodes and depth; absent = as the server."),
]
Lenience = Annotated[
    float | None,
    typer.Option(help="Above 0, up to 1 = exact: the lower, the more drafts are kept; absent = 1."),
]
NoSpeculation = Annotated[bool, typer.Option("--no-speculation", help="Plain decoding: the target alone.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds until an answer is given up.")]


def draft_tokens(text: str) -> DraftTokens:
    try:
        return read_draft_tokens(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no number and not {AUTO}", param_hint="--num-draft-tokens") from None


def generate_options(
    *,
    model: str | None,
    max_tokens: int,
    temperature: float,
    top_p: float | None,
    top_k: int | None,
    min_p: float | None,
    seed: int | None,
    stop: list[str] | None,
    num_draft_tokens: str | None,
    acceptance: AcceptanceRule | None,
    drafter: Drafter | None,
    tree: str | None,
    lenience: float | None,
    no_speculation: bool,
) -> GenerateOptions:
    """Return the SDK's arguments. What was not given is left out: the defaults are the SDK's and the server's."""
    options = GenerateOptions(max_tokens=max_tokens, temperature=temperature, stop=stop or ())
    if model is not None:
        options["model"] = model
    if top_p is not None:
        options["top_p"] = top_p
    if top_k is not None:
        options["top_k"] = top_k
    if min_p is not None:
        options["min_p"] = min_p
    if seed is not None:
        options["seed"] = seed
    options["speculation"] = Speculation(
        enabled=not no_speculation,
        num_draft_tokens=None if num_draft_tokens is None else draft_tokens(num_draft_tokens),
        acceptance=acceptance,
        drafter=drafter,
        tree=tree,
        lenience=lenience,
    )
    return options
