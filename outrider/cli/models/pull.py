"""`outrider pull`: fetches the files of a model that are needed to serve it from a hub, before a worker is started."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from outrider.cli.console import EXIT_INTERRUPTED, answer_console, errors_as_lines, note_console
from outrider.cli.models import hub
from outrider.wire.errors import ConfigError
from outrider.wire.models.model_id import local_path


def pull(
    model: Annotated[
        str,
        typer.Argument(metavar="HUB_ID", help="The model's id on the hub, owner/name; of a GGUF file owner/name:FILE."),
    ],
    revision: Annotated[
        str, typer.Option(help="Branch, tag or commit. Unless it is main, serve the model by its folder.")
    ] = hub.DEFAULT_REVISION,
    to: Annotated[
        Path | None,
        typer.Option(help="Folder to put the files into; absent = the hub's cache (HF_HOME), where `up` finds them."),
    ] = None,
    offline: Annotated[
        bool, typer.Option("--offline", help="Only check that all files are here; HF_HUB_OFFLINE=1 means the same.")
    ] = False,
) -> None:
    """Fetch a model: its configuration, tokenizer, chat template and weights as safetensors, and no other form of them.

    Complete files are not fetched again. HF_ENDPOINT names another hub, and HF_TOKEN is the token for models that need
    one.
    """
    notes = note_console()
    with errors_as_lines():
        if _local_path(model) is not None:
            raise ConfigError(f"{model} is a folder here: outrider up --target {shlex.quote(model)} reads it as it is")
        if offline or hub.is_offline():
            folder = hub.find(model, revision, to)
        else:
            notes.print(f"{model} at {revision}", markup=False)
            with _ending_at_once(notes):
                folder = hub.pull(model, revision, to)
        served_by_id = to is None and revision == hub.DEFAULT_REVISION
        target = str(folder)
        if served_by_id:
            target = model
        answer_console().print(str(folder), markup=False)
        notes.print(f"start it: outrider up --target {shlex.quote(target)} --draft DRAFT, or --no-draft", markup=False)


def _local_path(model: str) -> Path | None:
    try:
        return local_path(model)
    except ConfigError:
        raise ConfigError(f"{model!r} is no id of a hub's model: say OWNER/NAME, without the hub's address") from None


@contextmanager
def _ending_at_once(notes: Console) -> Iterator[None]:
    """End the process on Ctrl-C: the library would first wait for its threads, whose connections may stall."""

    def end(signal_number: int, frame: FrameType | None) -> None:
        hub.remove_unfinished()
        notes.print("\ninterrupted: the same command fetches what is missing")
        os._exit(EXIT_INTERRUPTED)

    previous = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
