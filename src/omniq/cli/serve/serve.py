"""`omniq serve` and `omniq send`: their options."""

from __future__ import annotations

from typing import Annotated

import typer


def _from_environment(name: str) -> str:
    return f"OMNIQ_SERVE_{name.upper()}"


def serve_command(
    store: Annotated[
        str | None,
        typer.Option(
            envvar=_from_environment("store"),
            metavar="URL",
            help="Storage URL. Default: the OMNIQ_… variables, else sqlite:///omniq.db.",
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(envvar=_from_environment("host"), metavar="ADDRESS", help="Address to listen on. Default 127.0.0.1."),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            envvar=_from_environment("port"), metavar="N", help="Port to listen on; 0 takes a free one. Default 12345."
        ),
    ] = None,
    heartbeat: Annotated[
        str | None,
        typer.Option(
            envvar=_from_environment("heartbeat"), metavar="DURATION", help="How long a connection may be silent. Default 45s."
        ),
    ] = None,
    grace: Annotated[
        str | None,
        typer.Option(
            envvar=_from_environment("grace"), metavar="DURATION", help="Time that clients get after SIGTERM. Default 25s."
        ),
    ] = None,
    backoff: Annotated[
        str | None,
        typer.Option(
            envvar=_from_environment("backoff"),
            metavar="POLICY",
            help="Retry policy of pushed tasks, like fixed:base=5000. Default n⁴ s.",
        ),
    ] = None,
    max_payload: Annotated[
        int | None,
        typer.Option(envvar=_from_environment("max_payload"), metavar="N", help="Bytes of a payload. Default 65535."),
    ] = None,
    max_line: Annotated[
        int | None, typer.Option(envvar=_from_environment("max_line"), metavar="N", help="Bytes of a command. Default 1048576.")
    ] = None,
    max_transaction: Annotated[
        int | None,
        typer.Option(
            envvar=_from_environment("max_transaction"), metavar="N", help="Commands of a transaction. Default 10000."
        ),
    ] = None,
    max_transaction_bytes: Annotated[
        int | None,
        typer.Option(
            envvar=_from_environment("max_transaction_bytes"), metavar="N", help="Bytes of a transaction. Default 16777216."
        ),
    ] = None,
    max_connections: Annotated[
        int | None,
        typer.Option(envvar=_from_environment("max_connections"), metavar="N", help="Connections at once. Default 15000."),
    ] = None,
    max_held: Annotated[
        int | None,
        typer.Option(envvar=_from_environment("max_held"), metavar="N", help="Tasks held by one connection. Default 10000."),
    ] = None,
    token_file: Annotated[
        str | None,
        typer.Option(
            envvar=_from_environment("token_file"), metavar="FILE", help="File with the token that clients must send."
        ),
    ] = None,
    tls_cert: Annotated[
        str | None,
        typer.Option(envvar=_from_environment("tls_cert"), metavar="FILE", help="Certificate chain (PEM); switches TLS on."),
    ] = None,
    tls_key: Annotated[
        str | None,
        typer.Option(envvar=_from_environment("tls_key"), metavar="FILE", help="Private key of the certificate (PEM)."),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure",
            envvar=_from_environment("insecure"),
            help="Listen beyond loopback without a token and TLS; metrics too.",
        ),
    ] = False,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            envvar=_from_environment("metrics_port"), metavar="N", help="Serve Prometheus metrics here; 0: a free one."
        ),
    ] = None,
    metrics_host: Annotated[
        str | None,
        typer.Option(
            envvar=_from_environment("metrics_host"), metavar="ADDRESS", help="Address of the metrics. Default 127.0.0.1."
        ),
    ] = None,
) -> None:
    """Serve the line protocol over TCP, for any language with sockets.

    One line on stderr says where it listens as soon as it does. Each option is also a variable: OMNIQ_SERVE_ and its name in
    capitals, like OMNIQ_SERVE_MAX_PAYLOAD. Durations are written like 45s, 200ms or 1m30s. SIGTERM and Ctrl-C drain; a second
    one ends the server at once.

    Example: omniq serve --store sqlite:///omniq.db --port 12345
    """
    from omniq.cli.serve.listening import run_server

    raise typer.Exit(
        run_server(
            store,
            token_file,
            host=host,
            port=port,
            heartbeat=heartbeat,
            grace=grace,
            backoff=backoff,
            max_payload=max_payload,
            max_line=max_line,
            max_transaction=max_transaction,
            max_transaction_bytes=max_transaction_bytes,
            max_connections=max_connections,
            max_held=max_held,
            tls_cert=tls_cert,
            tls_key=tls_key,
            insecure=insecure,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
        )
    )


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
