"""The `outrider` command: lists the commands, each of which is a function in a file of its own."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider import __version__
from outrider.cli.demo.demo import demo
from outrider.cli.doctor.doctor import doctor
from outrider.cli.generate.chat import chat
from outrider.cli.generate.generate import generate
from outrider.cli.models.pull import pull
from outrider.cli.monitor.top import top
from outrider.cli.scale import scale
from outrider.cli.secrets.certs import certs
from outrider.cli.secrets.keys import app as keys
from outrider.cli.train_head import train_head
from outrider.cli.up.up import VllmCommand, up
from outrider.lab.alpha import alpha
from outrider.lab.tune import tune

app = typer.Typer(
    name="outrider",
    help="Disaggregated speculative decoding: the target's own output, sooner.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.command(cls=VllmCommand)(up)
app.command("serve", cls=VllmCommand, help="The same as up, under vLLM's name: outrider serve MODEL.")(up)
app.command()(demo)
app.command()(generate)
app.command()(chat)
app.command()(pull)
app.command()(scale)
app.command()(top)
app.command()(doctor)
app.command()(alpha)
app.command()(tune)
app.command()(train_head)
app.command()(certs)
app.add_typer(keys, name="keys")


def _print_version(is_requested: bool) -> None:
    if is_requested:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _outrider(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line: the entry point of the console script `outrider`."""
    app()
