"""The command line: what an operator does from a shell."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from omniq._version import __version__
from omniq.errors import ConfigError, Invalid, OmniQError

app = typer.Typer(
    name="omniq",
    help="A job queue that is embedded in your program and durable by default.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"omniq {__version__}")
        raise typer.Exit


@app.callback()
def omniq(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A job queue that is embedded in your program and durable by default."""


@app.command()
def worker(
    modules: Annotated[list[str], typer.Argument(help="Modules with tasks; their functions and registered tasks may run.")],
    store: Annotated[
        str | None, typer.Option(help="Storage URL, for example sqlite:///omniq.db. Default: the OMNIQ_… variables.")
    ] = None,
    queues: Annotated[str | None, typer.Option(help="Queues to serve, in order, separated by commas. Default: all.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="How many tasks run at once.")] = 10,
    grace: Annotated[
        float | None, typer.Option(min=0, help="Seconds that running tasks get after SIGTERM. Default 25.")
    ] = None,
    drain_and_exit: Annotated[
        bool, typer.Option("--drain-and-exit", help="End when nothing is ready, running or waiting for a retry.")
    ] = False,
) -> None:
    """Run tasks. The working folder is put on the import path.

    Example: omniq worker myapp.tasks --store sqlite:///omniq.db --concurrency 20
    """
    from omniq.cli.worker import run_worker

    names = None if queues is None else [name.strip() for name in queues.split(",") if name.strip()]
    raise typer.Exit(run_worker(modules, store, names, concurrency, grace, drain_and_exit))


def _from_environment(name: str) -> str:
    return f"OMNIQ_SERVE_{name.upper()}"


@app.command()
def serve(
    store: Annotated[
        str | None,
        typer.Option(
            envvar=_from_environment("store"), help="Storage URL. Default: the OMNIQ_… variables, else sqlite:///omniq.db."
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option(envvar=_from_environment("host"), help="Address to listen on. Default 127.0.0.1.")
    ] = None,
    port: Annotated[
        int | None, typer.Option(envvar=_from_environment("port"), help="Port to listen on; 0 takes a free one. Default 12345.")
    ] = None,
    heartbeat: Annotated[
        str | None,
        typer.Option(envvar=_from_environment("heartbeat"), help="How long a connection may be silent. Default 45s."),
    ] = None,
    grace: Annotated[
        str | None, typer.Option(envvar=_from_environment("grace"), help="Time that clients get after SIGTERM. Default 25s.")
    ] = None,
    backoff: Annotated[
        str | None,
        typer.Option(
            envvar=_from_environment("backoff"), help="Retry policy of pushed tasks, like fixed:base=5000. Default n⁴ s."
        ),
    ] = None,
    max_payload: Annotated[
        int | None, typer.Option(envvar=_from_environment("max_payload"), help="Bytes of a payload. Default 65535.")
    ] = None,
    max_line: Annotated[
        int | None, typer.Option(envvar=_from_environment("max_line"), help="Bytes of a command. Default 1048576.")
    ] = None,
    max_transaction: Annotated[
        int | None,
        typer.Option(envvar=_from_environment("max_transaction"), help="Commands of a transaction. Default 10000."),
    ] = None,
    max_transaction_bytes: Annotated[
        int | None,
        typer.Option(envvar=_from_environment("max_transaction_bytes"), help="Bytes of a transaction. Default 16777216."),
    ] = None,
    max_connections: Annotated[
        int | None, typer.Option(envvar=_from_environment("max_connections"), help="Connections at once. Default 15000.")
    ] = None,
    max_held: Annotated[
        int | None, typer.Option(envvar=_from_environment("max_held"), help="Tasks held by one connection. Default 10000.")
    ] = None,
    token_file: Annotated[
        str | None, typer.Option(envvar=_from_environment("token_file"), help="File with the token that clients must send.")
    ] = None,
    tls_cert: Annotated[
        str | None, typer.Option(envvar=_from_environment("tls_cert"), help="Certificate chain (PEM); switches TLS on.")
    ] = None,
    tls_key: Annotated[
        str | None, typer.Option(envvar=_from_environment("tls_key"), help="Private key of the certificate (PEM).")
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", envvar=_from_environment("insecure"), help="Listen beyond loopback without a token and TLS."
        ),
    ] = False,
    metrics_port: Annotated[
        int | None, typer.Option(envvar=_from_environment("metrics_port"), help="Serve Prometheus metrics here; 0: a free one.")
    ] = None,
    metrics_host: Annotated[
        str | None, typer.Option(envvar=_from_environment("metrics_host"), help="Address of the metrics. Default 127.0.0.1.")
    ] = None,
) -> None:
    """Serve the line protocol over TCP, for any language with sockets.

    Example: omniq serve --store sqlite:///omniq.db --port 12345
    """
    from omniq.cli.serve import run_server

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


@app.command()
def send(
    host: Annotated[str, typer.Option(help="Address of the server.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the server.")] = 12345,
    token_file: Annotated[str | None, typer.Option(help="File with the token to send first.")] = None,
    tls: Annotated[bool, typer.Option("--tls", help="Speak TLS, and check the server's certificate.")] = False,
    ca_file: Annotated[str | None, typer.Option(help="Certificates to trust instead of the system's; implies --tls.")] = None,
) -> None:
    """Send the lines of stdin to a server and print its replies. Exit code 3 if any reply was ERR.

    Example: echo 'PUSH {"name": "resize"}' | omniq send
    """
    from omniq.cli.send import run_send

    raise typer.Exit(run_send(host, port, token_file, tls, ca_file))


def main() -> None:
    """Run the command; a mistake or a failing store is a sentence on stderr and an exit code, never a traceback."""
    try:
        app()
    except (ConfigError, Invalid) as exc:
        _leave(exc, 2)
    except OmniQError as exc:
        _leave(exc, 1)


def _leave(exc: Exception, code: int) -> None:
    typer.echo(f"omniq: {exc}", err=True)
    sys.exit(code)
