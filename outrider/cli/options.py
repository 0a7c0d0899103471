"""Command-line options that several commands share: single options, and groups as dataclasses, which `grouped` expands
for typer.
"""

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
    """Decorator of a command: replace each parameter that is a dataclass by one option per field of it, for typer."""
    # f(name: str, *, limits: Limits) with Limits(a: int, b: int): f(*, name: str, a: int, b: int)
    groups: dict[str, Any] = {}
    options: list[inspect.Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        if not is_dataclass(hints[name]):
            options.append(_keyword(name, hints[name], parameter.default))
            continue
        groups[name] = hints[name]
        field_hints = get_type_hints(hints[name], include_extras=True)
        for field in fields(groups[name]):
            options.append(_keyword(field.name, field_hints[field.name], field.default))

    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    run.__name__ = command.__name__
    run.__doc__ = command.__doc__
    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return run


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@dataclass(frozen=True)
class Generation:
    """Command-line options of a request: sampling and speculation. For an option that is absent, the default of the SDK
    or of the gateway holds.
    """

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
        Drafter | None, typer.Option(help="What proposes draft tokens; absent = the server's default.")
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
        """Return these options as keyword arguments of `Client.generate`. model: id of the served model; None = the
        only one.
        """
        options = GenerateOptions(max_tokens=max_tokens, temperature=self.temperature, stop=self.stop or ())
        given = {"top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p, "seed": self.seed, "model": model}
        options.update({name: value for name, value in given.items() if value is not None})  # type: ignore[typeddict-item]
        if self.json_schema is not None or self.regex is not None or self.choice:
            schema = None
            if self.json_schema is not None:
                schema = _schema_text(self.json_schema)
            options["structured_outputs"] = StructuredOutputs(json=schema, regex=self.regex, choice=self.choice or None)
        num_draft_tokens = None
        if self.num_draft_tokens is not None:
            num_draft_tokens = read_num_draft_tokens(self.num_draft_tokens)
        options["speculation"] = Speculation(
            enabled=not self.no_speculation,
            num_draft_tokens=num_draft_tokens,
            acceptance=self.acceptance,
            drafter=self.drafter,
            tree=self.tree,
            lenience=self.lenience,
        )
        return options


@dataclass(frozen=True)
class CallOptions:
    """Command-line options of a call: the model, the timeout, and the connection to the gateway."""

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
        """The connection's options as keyword arguments of `Client`."""
        return ConnectOptions(
            tls=self.tls, tls_ca=self.tls_ca, tls_cert=self.tls_cert, tls_key=self.tls_key, api_key=self.api_key
        )


@dataclass(frozen=True)
class PlacementOptions:
    """Command-line options for the devices, CPU cores and dtype of a pair's workers."""

    target_device: Annotated[str | None, typer.Option(help="cpu, cuda or auto; without Ray also cuda:N.")] = None
    draft_device: Annotated[str | None, typer.Option(help="The same for the draft.")] = None
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16 or auto, for both.")] = None
    target_cores: Annotated[str | None, typer.Option(help="CPU cores of the target, such as 1 or 0,2-3.")] = None
    draft_cores: Annotated[str | None, typer.Option(help="CPU cores of the draft.")] = None

    def workers(self, target: str | None, draft: str | None) -> dict[str, dict[str, str | None]]:
        """Return the settings of both workers by role and setting name; None = the setting was not given. target,
        draft: their models.
        """
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
    """Return completions for the value of --draft: drafters without a model, and folders, that begin with `incomplete`.

    If no drafter begins with it, the list is empty, and the shell completes folders by itself.
    """
    words = list[str]()
    for drafter in TABLE_DRAFTERS:
        if drafter.startswith(incomplete):
            words.append(f"{drafter}:" if drafter.reads_text else str(drafter))
    if not words:
        return []
    folders = sorted(Path().glob(f"{glob.escape(incomplete)}*/"))
    return words + [f"{folder}/" for folder in folders]
