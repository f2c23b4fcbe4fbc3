"""`omniq send`: lines of stdin to a server, its replies to stdout."""

from __future__ import annotations

from typing import Annotated

import typer


def send_command(
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Address of the server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="Port of the server.")] = 12345,
    token_file: Annotated[str | None, typer.Option(metavar="FILE", help="File with the token to send first.")] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Speak TLS, and check the server's certificate.")] = False,
    ca_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Certificates to trust instead of the system's; implies --tls.")
    ] = None,
) -> None:
    """Send the lines of stdin to a server and print its replies.

    It ends when stdin has ended and every reply has come. While nobody listens it tries again, for 5 s. Exit code 1 if the
    connection failed, 3 if any reply was ERR.

    Example: echo 'PUSH {"name": "resize"}' | omniq send
    """
    from omniq.cli.serve.sending import run_send

    raise typer.Exit(run_send(host, port, token_file, tls, ca_file))
