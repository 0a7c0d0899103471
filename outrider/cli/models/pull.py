"""`outrider pull`: fetch what is served of a model from a hub, before it is started."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.console import answer_console, errors_as_lines, note_console
from outrider.cli.models import hub
from outrider.cli.progress import DownloadProgress
from outrider.wire.errors import ConfigError
from outrider.wire.models.model_id import local_path


def pull(
    model: Annotated[
        str,
        typer.Argument(metavar="HUB_ID", help="The model's id on the hub, owner/name; of a GGUF file owner/name:FILE."),
    ],
    revision: Annotated[
        str, typer.Option(help="Branch, tag or commit; other than main, it is started by its folder.")
    ] = hub.DEFAULT_REVISION,
    to: Annotated[
        Path | None,
        typer.Option(help="Folder to put the files into; absent = the hub's cache (HF_HOME), where `up` finds them."),
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Only look whether all is there; HF_HUB_OFFLINE=1 means the same.")
    ] = False,
) -> None:
    """Fetch a model: its configuration, tokenizer, chat template and weights as safetensors, and no other form of them.

    What was interrupted goes on where it was. HF_ENDPOINT names another hub, HF_TOKEN a token for models that ask for
    one.
    """
    notes = note_console()
    with errors_as_lines():
        if _folder(model) is not None:
            raise ConfigError(f"{model} is a folder here: outrider up --target {shlex.quote(model)} reads it as it is")
        hub.check_installed()
        if offline or hub.is_offline():
            folder = hub.find(model, revision, to)
        else:
            notes.print(f"{model} at {revision}", markup=False)
            try:
                with DownloadProgress(notes) as progress:
                    folder = hub.pull(model, revision, to, lambda there, total: progress.tell("fetched", there, total))
            except KeyboardInterrupt:
                notes.print("interrupted: the same command goes on where it stopped")
                raise
        by_id = to is None and revision == hub.DEFAULT_REVISION
        named = shlex.quote(model if by_id else str(folder))
        answer_console().print(str(folder), markup=False)
        notes.print(f"start it: outrider up --target {named} --draft DRAFT, or --no-draft", markup=False)


def _folder(model: str) -> Path | None:
    try:
        return local_path(model)
    except ConfigError:
        raise ConfigError(f"{model!r} is no id of a hub's model: say OWNER/NAME, without the hub's address") from None
