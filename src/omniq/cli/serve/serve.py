"""`omniq serve`: the line protocol over TCP."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from omniq.cli.commands import command


def _word(name: str, metavar: str | None, help: str) -> Any:
    # With the variable named here and not by a prefix, a mistake in it is told with its name.
    return typer.Option(f"--{name.replace('_', '-')}", envvar=f"OMNIQ_SERVE_{name.upper()}", metavar=metavar, help=help)


class Given(msgspec.Struct, frozen=True):
    """The options of the command, which are those of `ServeOptions` in words; None where its default holds."""

    store: Annotated[
        str | None, _word("store", "URL", "Storage URL. Default: the OMNIQ_… variables, else sqlite:///omniq.db.")
    ] = None
    host: Annotated[str | None, _word("host", "ADDRESS", "Address to listen on. Default 127.0.0.1.")] = None
    port: Annotated[int | None, _word("port", "N", "Port to listen on; 0 takes a free one. Default 12345.")] = None
    heartbeat: Annotated[str | None, _word("heartbeat", "DURATION", "How long a connection may be silent. Default 45s.")] = None
    grace: Annotated[str | None, _word("grace", "DURATION", "Time that clients get after SIGTERM. Default 25s.")] = None
    backoff: Annotated[
        str | None, _word("backoff", "POLICY", "Retry policy of pushed tasks, like fixed:base=5000. Default n⁴ s.")
    ] = None
    max_payload: Annotated[int | None, _word("max_payload", "N", "Bytes of a payload. Default 65535.")] = None
    max_line: Annotated[int | None, _word("max_line", "N", "Bytes of a command. Default 1048576.")] = None
    max_transaction: Annotated[int | None, _word("max_transaction", "N", "Commands of a transaction. Default 10000.")] = None
    max_transaction_bytes: Annotated[
        int | None, _word("max_transaction_bytes", "N", "Bytes of a transaction. Default 16777216.")
    ] = None
    max_connections: Annotated[int | None, _word("max_connections", "N", "Connections at once. Default 15000.")] = None
    max_held: Annotated[int | None, _word("max_held", "N", "Tasks held by one connection. Default 10000.")] = None
    token_file: Annotated[str | None, _word("token_file", "FILE", "File with the token that clients must send.")] = None
    tls_cert: Annotated[str | None, _word("tls_cert", "FILE", "Certificate chain (PEM); switches TLS on.")] = None
    tls_key: Annotated[str | None, _word("tls_key", "FILE", "Private key of the certificate (PEM).")] = None
    insecure: Annotated[bool, _word("insecure", None, "Listen beyond loopback without a token and TLS; metrics too.")] = False
    metrics_port: Annotated[int | None, _word("metrics_port", "N", "Serve Prometheus metrics here; 0: a free one.")] = None
    metrics_host: Annotated[str | None, _word("metrics_host", "ADDRESS", "Address of the metrics. Default 127.0.0.1.")] = None


@command
def serve_command(given: Given) -> None:
    """Serve the line protocol over TCP, for any language with sockets.

    One line on stderr says where it listens as soon as it does. Each option is also a variable: OMNIQ_SERVE_ and its name in
    capitals, like OMNIQ_SERVE_MAX_PAYLOAD. Durations are written like 45s, 200ms or 1m30s. SIGTERM and Ctrl-C drain; a second
    one ends the server at once.

    Example: omniq serve --store sqlite:///omniq.db --port 12345
    """
    from omniq.cli.serve.listening import run_server

    run_server(**msgspec.structs.asdict(given))
