"""`outrider keys`: makes, lists and revokes the API keys of a gateway. A key is shown once; the file has its hash."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from rich.table import Table

from outrider.cli.console import answer_console, errors_as_lines, note_console
from outrider.wire.errors import ConfigError
from outrider.wire.settings.api_keys import ApiKey, digest_of, new_key, read_keys, write_keys
from outrider.wire.settings.config import reason

app = typer.Typer(help="The API keys of a gateway (--api-keys FILE).", no_args_is_help=True)

KeyFile = Annotated[
    Path,
    typer.Option("--file", envvar="OUTRIDER_GATEWAY_API_KEYS", help="The gateway's file of keys.", show_envvar=True),
]
DEFAULT_FILE = Path("api-keys.yaml")
Name = Annotated[str, typer.Argument(help="Whose key it is; shown in logs and metrics.")]


@app.command("new")
def new(
    name: Name,
    file: KeyFile = DEFAULT_FILE,
    requests_per_minute: Annotated[int | None, typer.Option(help="Requests a minute; absent = any number.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Tokens of prompt and output a minute; absent = any number.")
    ] = None,
    max_concurrent: Annotated[
        int | None, typer.Option(help="Answers running or waiting at once; absent = any number.")
    ] = None,
    weight: Annotated[
        float, typer.Option(help="Share of a busy gateway, relative to that of a key of weight 1.")
    ] = 1.0,
    expires_days: Annotated[float | None, typer.Option(help="Days until the key expires; absent = never.")] = None,
    control_tokens_in_content: Annotated[
        str, typer.Option(help="text = control tokens in the key's chats are text; allow = the gateway's setting.")
    ] = "allow",
) -> None:
    """Make a key. The key is printed on stdout, this once only, and its hash is added to the file."""
    with errors_as_lines():
        keys: tuple[ApiKey, ...] = ()
        if file.exists():
            keys = read_keys(file)
        if any(key.name == name for key in keys):
            raise ConfigError(f"{file} has a key of {name!r} already; revoke it first, or choose another name")
        expires = None
        if expires_days is not None:
            expires = datetime.now(UTC) + timedelta(days=expires_days)
        secret = new_key()
        fields = {
            "name": name,
            "sha256": digest_of(secret),
            "requests_per_minute": requests_per_minute,
            "tokens_per_minute": tokens_per_minute,
            "max_concurrent": max_concurrent,
            "weight": weight,
            "expires": expires,
            "control_tokens_in_content": control_tokens_in_content,
        }
        try:
            entry = ApiKey.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            raise ConfigError(f"{first['loc'][0]} is {first['input']!r}: {reason(first)}") from None
        write_keys(file, (*keys, entry))
        note_console().print(f"the key of {name}; it is not shown again, {file} has its hash:")
        typer.echo(secret)


@app.command("list")
def list_(file: KeyFile = DEFAULT_FILE) -> None:
    """List the keys of the file with their limits and expiry."""
    with errors_as_lines():
        table = Table("name", "requests/min", "tokens/min", "at once", "weight", "expires")
        for key in read_keys(file):
            limits = map(_limit, (key.requests_per_minute, key.tokens_per_minute, key.max_concurrent))
            expires = "never"
            if key.expires is not None:
                expires = key.expires.isoformat(timespec="seconds")
            table.add_row(key.name, *limits, f"{key.weight:g}", expires)
        answer_console().print(table)


def _limit(value: int | None) -> str:
    if value is None:
        return "any"
    return str(value)


@app.command("revoke")
def revoke(name: Name, file: KeyFile = DEFAULT_FILE) -> None:
    """Remove a key from the file; a running gateway refuses it within seconds."""
    with errors_as_lines():
        keys = read_keys(file)
        remaining = tuple(key for key in keys if key.name != name)
        if len(remaining) == len(keys):
            known = ", ".join(key.name for key in keys) or "none"
            raise ConfigError(f"{file} has no key of {name!r}; it has: {known}")
        write_keys(file, remaining)
        note_console().print(f"the key of {name} is revoked")
