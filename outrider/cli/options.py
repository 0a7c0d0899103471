"""The options that several commands share, as dataclasses that `grouped` gives typer, and what they stand for."""

from __future__ import annotations

import glob
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from outrider.client import AcceptanceRule, ConnectOptions, Drafter, GenerateOptions, Speculation, StructuredOutputs
from outrider.client.aio import DEFAULT_TIMEOUT_S
from outrider.client.connect import KEY_VARIABLE
from outrider.wire.requests.drafters import TABLE_DRAFTERS
from outrider.wire.requests.speculation import read_num_draft_tokens

Address = Annotated[
    str, typer.Option("--address", "--gateway", help="A gateway's gRPC or HTTP address; a host alone = its port 8001.")
]
MaxTokens = Annotated[int, typer.Option(help="Largest number of output tokens.")]
TopP = Annotated[float | None, typer.Option(help="Keep the smallest set of tokens with this mass.")]
TopK = Annotated[int | None, typer.Option(help="Keep the k most likely tokens.")]
MinP = Annotated[float | None, typer.Option(help="Keep tokens with this share of the best one's probability.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show every part's log, not only its warnings.")]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return the command with the fields of its dataclass parameters as options of their own, as typer wants them."""
    groups: dict[str, Any] = {}
    options: list[inspect.Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        own = {name: (hints[name], parameter.default)}
        if is_dataclass(hints[name]):
            groups[name] = hints[name]
            kinds = get_type_hints(hints[name], include_extras=True)
            own = {field.name: (kinds[field.name], field.default) for field in fields(hints[name])}
        options += [
            inspect.Parameter(each, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for each, (kind, default) in own.items()
        ]

    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return run


@dataclass(frozen=True)
class Generation:
    """How an answer is made. What is not given is left to the SDK and the server."""

    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0
    top_p: TopP = None
    top_k: TopK = None
    min_p: MinP = None
    seed: Annotated[int | None, typer.Option(help="Key of the draws; absent = another one each time.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the output; may be given several times.")] = (
        None
    )
    json_schema: Annotated[
        Path | None,
        typer.Option(help="File with a JSON Schema that the answer follows.", exists=True, dir_okay=False),
    ] = None
    regex: Annotated[str | None, typer.Option(help="Expression that the answer matches from beginning to end.")] = None
    choice: Annotated[
        list[str] | None, typer.Option(help="Text that the answer may be; may be given several times.")
    ] = None
    num_draft_tokens: Annotated[
        str | None,
        typer.Option(
            "--num-draft-tokens",
            "-K",
            metavar="N|auto",
            help="Tokens drafted a round, or auto: as many as pay; absent = the server's default.",
        ),
    ] = None
    acceptance: Annotated[
        AcceptanceRule | None,
        typer.Option(help="Which drafts are kept at temperature > 0; absent = the server's default."),
    ] = None
    drafter: Annotated[
        Drafter | None, typer.Option(help="Who guesses what comes next; absent = the server's default.")
    ] = None
    tree: Annotated[
        str | None,
        typer.Option(
            help="Draft a tree: children by depth, 4x2x1, or best:12x4, nodes and depth; absent = as the server."
        ),
    ] = None
    lenience: Annotated[
        float | None, typer.Option(help="Above 0, up to 1 = exact: the lower, the more drafts are kept; absent = 1.")
    ] = None
    no_speculation: Annotated[bool, typer.Option("--no-speculation", help="Plain decoding: the target alone.")] = False

    def options(self, model: str | None, max_tokens: int) -> GenerateOptions:
        """Return the SDK's arguments."""
        given = {name: getattr(self, name) for name in ("top_p", "top_k", "min_p", "seed")} | {"model": model}
        options = GenerateOptions(max_tokens=max_tokens, temperature=self.temperature, stop=self.stop or ())
        options.update({name: value for name, value in given.items() if value is not None})  # type: ignore[typeddict-item]
        if self.json_schema is not None or self.regex is not None or self.choice:
            options["structured_outputs"] = StructuredOutputs(
                json=None if self.json_schema is None else _schema_text(self.json_schema),
                regex=self.regex,
                choice=self.choice or None,
            )
        options["speculation"] = Speculation(
            enabled=not self.no_speculation,
            num_draft_tokens=None if self.num_draft_tokens is None else read_num_draft_tokens(self.num_draft_tokens),
            acceptance=self.acceptance,
            drafter=self.drafter,
            tree=self.tree,
            lenience=self.lenience,
        )
        return options


@dataclass(frozen=True)
class CallOptions:
    """Which model is asked, for how long, and how the gateway is reached."""

    model: Annotated[str | None, typer.Option(help="A served model's id; absent = the only one.")] = None
    timeout: Annotated[float, typer.Option(help="Seconds until an answer is given up.")] = DEFAULT_TIMEOUT_S
    tls: Annotated[bool, typer.Option("--tls", help="Connect with TLS; implied by the options that follow.")] = False
    tls_ca: Annotated[Path | None, typer.Option(help="PEM file of the CAs to trust; absent = the system's.")] = None
    tls_cert: Annotated[Path | None, typer.Option(help="PEM file with a certificate to show; needs --tls-key.")] = None
    tls_key: Annotated[Path | None, typer.Option(help="PEM file with its key.")] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar=KEY_VARIABLE, show_envvar=True, help="API key; better in the environment, where `ps` shows none."
        ),
    ] = None

    @property
    def options(self) -> ConnectOptions:
        """Return the SDK's arguments."""
        return ConnectOptions(
            tls=self.tls, tls_ca=self.tls_ca, tls_cert=self.tls_cert, tls_key=self.tls_key, api_key=self.api_key
        )


@dataclass(frozen=True)
class PlacementOptions:
    """Where the workers of a pair run, and in which type of numbers."""

    target_device: Annotated[str | None, typer.Option(help="cpu, cuda or auto; without Ray also cuda:N.")] = None
    draft_device: Annotated[str | None, typer.Option(help="The same for the draft.")] = None
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or auto, for both.")] = None
    target_cores: Annotated[str | None, typer.Option(help="CPU cores of the target, such as 1 or 0,2-3.")] = None
    draft_cores: Annotated[str | None, typer.Option(help="CPU cores of the draft.")] = None

    def workers(self, target: str | None, draft: str | None) -> dict[str, dict[str, str | None]]:
        """Return the settings of both roles with these models, None where one was not given."""
        return {
            "target": {
                "model": target,
                "device": self.target_device,
                "dtype": self.dtype,
                "cpu_cores": self.target_cores,
            },
            "draft": {"model": draft, "device": self.draft_device, "dtype": self.dtype, "cpu_cores": self.draft_cores},
        }


def _schema_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}", param_hint="--json-schema") from None


def completed_draft(incomplete: str) -> list[str]:
    """Return the drafters without a model that begin so, and folders that do.

    Nothing where no drafter does: the shell then completes folders by itself, and better.
    """
    named = [drafter for drafter in TABLE_DRAFTERS if drafter.startswith(incomplete)]
    drafters = [f"{drafter}:" if drafter.reads_text else str(drafter) for drafter in named]
    return drafters and [*drafters, *(f"{each}/" for each in sorted(Path().glob(f"{glob.escape(incomplete)}*/")))]
