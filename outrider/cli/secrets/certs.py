"""`outrider certs`: makes certificates by `authority.py`, which needs an extra that no other command needs."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.console import errors_as_lines, note_console
from outrider.wire.errors import ConfigError


def certs(
    folder: Annotated[Path, typer.Argument(help="Where to put the certificates. A CA that is there signs them.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Name or address by which users reach the gateway, such as *.example.com; may be given several times. "
            "Absent = those of the last certificate, else localhost, 127.0.0.1 and ::1."
        ),
    ] = None,
) -> None:
    """Make or renew certificates, in folders of FOLDER: gateway, draft, target and launcher for the tls_dir of each,
    and public for the gateway's public_tls_dir.

    Running parts read renewed files by themselves. Certificates are valid for a year, the CA for ten. Keep ca-key.pem
    off the machines that serve.
    """
    with errors_as_lines():
        try:
            from outrider.cli.secrets.authority import write_certificates
        except ImportError as error:
            raise ConfigError(f"{error}: certificates are made with the extra: pip install 'outrider[certs]'") from None
        written = write_certificates(folder, host or [], datetime.now(UTC))
        for place in written:
            typer.echo(place)
        note_console().print(f"users trust them by {folder / 'ca.pem'}: --tls-ca, or SSL_CERT_FILE", markup=False)
