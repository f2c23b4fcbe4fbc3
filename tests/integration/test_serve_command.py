"""`omniq serve` and `omniq send` as commands: options, variables, exit codes, TLS, metrics, signals."""

import asyncio
import contextlib
import io
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forks import Python, run
from support.tcp import TOKEN, Peer, ServerProcess, environment
from support.waiting import eventually, wait_for
from typer.main import get_command

from omniq import MemoryStorage, OmniQ
from omniq.cli.app import app
from omniq.cli.serve.sending import run_send
from omniq.client import Client
from omniq.errors import ConfigError, ConnectionLost
from omniq.server import ServeOptions, Server


def omniq(*arguments: str, stdin: str = "", folder: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "omniq", *arguments]
    env = environment() | variables
    return run(command, stdin, folder, env, timeout=30)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    started = ServerProcess("memory://", tmp_path_factory.mktemp("serve"), ["--heartbeat", "2500ms"]).ready()
    yield started
    started.end()


# -- serve -------------------------------------------------------------------------------------------


def test_a_taken_port_is_exit_code_1_and_a_sentence(server: ServerProcess, tmp_path: Path) -> None:
    done = omniq("serve", "--port", str(server.port), folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"omniq: port {server.port} of 127.0.0.1 is taken: stop what listens there, or use --port\n"


def test_a_taken_port_for_the_metrics_is_named_too(server: ServerProcess, tmp_path: Path) -> None:
    done = omniq("serve", "--port", "0", "--metrics-port", str(server.port), folder=tmp_path)
    assert done.returncode == 1
    assert f"port {server.port} of 127.0.0.1 is taken: stop what listens there, or use --metrics-port\n" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--heartbeat", "45"], "heartbeat: duration '45': write numbers with units"),
        (["--grace", "soon"], "grace: duration 'soon'"),
        (["--heartbeat", "0s"], "heartbeat must be from 1ms to 24h"),
        (["--port", "70000"], "port must be a port from 0 to 65535"),
        (["--port", "http"], "integer"),
        (["--max-payload", "0"], "max_payload must be at least 1"),
        (["--max-payload", "9999999"], "max_line must be at least max_payload"),
        (["--store", "ftp://x"], "unknown scheme"),
        (["--backoff", "never"], "backoff 'never'"),
        (["--host", "0.0.0.0"], "needs a token file and a TLS certificate"),  # noqa: S104
        (["--token-file", "missing"], "token file missing cannot be read"),
        (["--tls-cert", "missing.pem"], "belong together"),
        (["--tls-cert", "missing.pem", "--tls-key", "missing.key"], "cannot be used"),
    ],
)
def test_a_bad_value_is_exit_code_2_and_a_sentence(arguments: list[str], says: str, tmp_path: Path) -> None:
    done = omniq("serve", *arguments, folder=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_every_option_has_a_variable_of_its_name() -> None:
    options = [option for option in get_command(app).commands["serve"].params if option.name != "help"]  # type: ignore[attr-defined]
    assert {option.name: option.envvar for option in options} == {
        name: f"OMNIQ_SERVE_{name.upper()}"
        for name in ("store", "token_file", *ServeOptions.__struct_fields__)
        if name != "token"
    }


def test_every_option_is_a_variable_too(tmp_path: Path) -> None:
    variables = {"OMNIQ_SERVE_HEARTBEAT": "1.5", "OMNIQ_SERVE_PORT": "0"}
    assert "duration '1.5'" in omniq("serve", folder=tmp_path, **variables).stderr
    done = omniq("serve", folder=tmp_path, OMNIQ_SERVE_MAX_PAYLOAD="nine")
    assert done.returncode == 2
    assert "OMNIQ_SERVE_MAX_PAYLOAD" in done.stderr


def test_the_default_store_is_sqlite_in_the_working_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "omniq", "serve", "--port", "0"]
    with Python(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment()) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert re.fullmatch(r"omniq: listening on 127\.0\.0\.1:\d+, store sqlite:///omniq\.db\n", line)
        with Client(port=int(re.findall(r":(\d+),", line)[0])) as client:
            assert client.push("x", {"n": 1}) == 1
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    with OmniQ.from_url(f"sqlite:///{tmp_path}/omniq.db") as oq:
        (task,) = oq.find()[0]
        assert (task.id, task.func_path, task.kwargs) == ("1", "x", {"n": 1})


def test_the_limit_of_open_files_is_raised(tmp_path: Path) -> None:
    command = f"ulimit -S -n 64 && exec {sys.executable} -m omniq serve --store memory:// --port 0"
    with subprocess.Popen(["sh", "-c", command], stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=environment()) as process:
        assert process.stderr is not None
        port = int(re.findall(r":(\d+),", process.stderr.readline())[0])
        peers = [Peer(("127.0.0.1", port)) for _ in range(200)]
        assert {peer.ask("PING") for peer in peers} == {"PONG {}"}
        for peer in peers:
            peer.close()
        process.terminate()
        assert process.wait(10) == 0


def test_sigterm_ends_an_idle_server_at_once(tmp_path: Path) -> None:
    server = ServerProcess("memory://", tmp_path).ready()
    begun = time.monotonic()
    assert server.stop() == 0
    assert time.monotonic() - begun < 3


def test_a_second_signal_leaves_at_once(tmp_path: Path) -> None:
    server = ServerProcess("memory://", tmp_path, ["--grace", "60s"]).ready()
    with Peer(server.address) as peer:
        peer.send('PUSH {"name":"x"}', "FETCH")
        assert [peer.recv()[:2], peer.recv()[:2]] == ["OK", "OK"]
        server.signal(signal.SIGTERM)
        wait_for(lambda: "stopping" in server.errors)
        server.signal(signal.SIGTERM)
        assert server.popen.wait(10) == 128 + signal.SIGTERM


def test_a_worker_takes_over_what_a_killed_server_held(tmp_path: Path) -> None:
    server = ServerProcess(f"sqlite:///{tmp_path}/q.db", tmp_path).ready()
    with OmniQ.from_url(f"sqlite:///{tmp_path}/q.db") as oq, Peer(server.address) as peer:
        peer.send('PUSH {"name":"support.jobs:add","payload":[1,2],"retry":0}', "FETCH")
        assert [peer.recv()[:2], peer.recv()[:2]] == ["OK", "OK"]
        server.kill()
        with oq.worker():
            begun = time.monotonic()
            result = oq.get_result("1", wait=True, timeout=10)
        assert result is not None
        assert (result.result, result.attempts) == (3, 1)
        assert time.monotonic() - begun < 2


# -- metrics -----------------------------------------------------------------------------------------


def test_metrics(tmp_path: Path) -> None:
    server = ServerProcess("memory://", tmp_path, ["--metrics-port", "0"]).ready()
    try:
        with Peer(server.address) as peer:
            peer.send("PING", 'PUSH {"name":"x"}', 'PUSH {"name":"x"}', "FETCH", 'FETCH {"queues":[]}', "NOPE")
            assert [peer.recv().split(" ")[0] for _ in range(6)] == ["PONG", "OK", "OK", "OK", "EMPTY", "ERR"]
            with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/any/path", timeout=10) as page:
                text = page.read().decode()
        for line in (
            "masenko_clients_total 1.0",
            'masenko_requests_total{verb="PING"} 1.0',
            'masenko_requests_total{verb="PUSH"} 2.0',
            'masenko_requests_total{verb="FETCH"} 1.0',
            'masenko_responses_total{verb="OK"} 3.0',
            'masenko_responses_total{verb="EMPTY"} 1.0',
            'masenko_responses_total{verb="ERR"} 1.0',
            'masenko_tasks_total{kind="ready",queue="default"} 1.0',
            'masenko_tasks_total{kind="toack",queue="default"} 1.0',
            "omniq_server_held_tasks 1.0",
            "omniq_server_connections_total 1.0",
        ):
            assert line in text.splitlines(), f"{line}\n{text}"
        assert "# TYPE masenko_clients_total gauge" in text
        assert server.stop() == 0
    finally:
        server.end()


# -- TLS ---------------------------------------------------------------------------------------------


def make_certificate(folder: Path) -> None:
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    make += " -addext subjectAltName=DNS:localhost,IP:127.0.0.1 -keyout key.pem -out cert.pem"
    subprocess.run(make.split(), cwd=folder, check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the command openssl")
def test_tls_clients_that_say_nothing_do_not_hold_the_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One begins to agree on TLS and stops, one is idle and does not answer the goodbye, one says goodbye first."""
    make_certificate(tmp_path)
    trusting = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
    options = ServeOptions(port=0, tls_cert=str(tmp_path / "cert.pem"), tls_key=str(tmp_path / "key.pem"), grace=60)

    def connected(server: Server) -> ssl.SSLSocket:
        plain = socket.create_connection(server.address, 10)
        return trusting.wrap_socket(plain, server_hostname="localhost")

    async def scenario() -> None:
        async with MemoryStorage() as storage, Server(storage, options) as server:
            begun = socket.create_connection(server.address, 10)
            idle = await asyncio.to_thread(connected, server)
            leaving = await asyncio.to_thread(connected, server)
            await asyncio.to_thread(leaving.sendall, b"QUIT\n")
            assert await asyncio.to_thread(leaving.recv, 10) == b"OK {}\n"
            async with asyncio.timeout(20):
                await server.stop()
            assert await asyncio.to_thread(idle.recv, 100) == b'ERR {"msg":"server is shutting down"}\n'
            for client in (begun, idle, leaving):
                client.close()
            await eventually(lambda: len(asyncio.all_tasks()) == 1)

    asyncio.run(scenario())
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the command openssl")
def test_secrets_that_others_can_read_are_told(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    (tmp_path / "key.pem").chmod(0o640)
    server = ServerProcess("memory://", tmp_path, ["--tls-cert", "cert.pem", "--tls-key", "key.pem", "--token-file", "token"])
    try:
        server.ready()
        assert "omniq: warning: other users can read the token file token (mode 0644): chmod 600 token\n" in server.errors
        assert "other users can read the TLS key key.pem (mode 0640): chmod 600 key.pem\n" in server.errors
        (tmp_path / "token").chmod(0o600)
        arguments = ["send", "--port", str(server.port), "--ca-file", "cert.pem", "--token-file", "token"]
        assert omniq(*arguments, stdin="PING\n", folder=tmp_path).stderr == ""
        (tmp_path / "token").chmod(0o604)
        said = omniq(*arguments, stdin="PING\n", folder=tmp_path)
        assert said.stderr == "omniq: warning: other users can read the token file token (mode 0604): chmod 600 token\n"
        assert said.stdout == "PONG {}\n"
    finally:
        server.end()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the command openssl")
def test_tls_and_a_token(tmp_path: Path) -> None:
    make_certificate(tmp_path)
    options = ["--tls-cert", "cert.pem", "--tls-key", "key.pem", "--token-file", "token"]
    server = ServerProcess("memory://", tmp_path, options).ready()
    try:
        assert "with TLS" in server.errors
        trusting = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        with Client(*server.address, tls=trusting, token=TOKEN) as client:
            assert client.push("x") == 1
            assert client.fetch() is not None
        with Client(*server.address, tls=ssl.create_default_context(), reconnect=0.1) as client, pytest.raises(ConnectionLost):
            client.ping()
        with Client(*server.address, reconnect=0.1) as client, pytest.raises(ConnectionLost):
            client.ping()
        done = omniq(
            "send",
            "--port",
            str(server.port),
            "--ca-file",
            "cert.pem",
            "--token-file",
            "token",
            stdin="PING\n",
            folder=tmp_path,
        )
        assert (done.returncode, done.stdout) == (0, "PONG {}\n")
    finally:
        server.end()


def test_listening_beyond_loopback_needs_both_or_to_be_told() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):  # noqa: S104
        with pytest.raises(ConfigError, match="--insecure"):
            ServeOptions(host=host)
        with pytest.raises(ConfigError, match="--insecure"):
            ServeOptions(host=host, token="secret")
        ServeOptions(host=host, insecure=True)
        ServeOptions(host=host, token="secret", tls_cert="c", tls_key="k")
    for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        ServeOptions(host=host)


def test_metrics_beyond_loopback_need_to_be_told() -> None:
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):  # noqa: S104
        with pytest.raises(ConfigError, match=r"metrics on .* need --insecure"):
            ServeOptions(metrics_host=host, metrics_port=0)
        with pytest.raises(ConfigError, match="--insecure"):
            ServeOptions(metrics_host=host, metrics_port=0, token="secret", tls_cert="c", tls_key="k")
        ServeOptions(metrics_host=host, metrics_port=0, insecure=True)
        ServeOptions(metrics_host=host)
    ServeOptions(metrics_host="::1", metrics_port=0)


# -- send --------------------------------------------------------------------------------------------


def test_send_gives_each_line_its_reply(server: ServerProcess) -> None:
    lines = 'PING\nPUSH {"name":"x","queue":"send"}\nATOMIC\nPUSH {"name":"y","queue":"send"}\nDONE\nFETCH {"queues":["send"]}'
    done = omniq("send", "--port", str(server.port), stdin=lines)
    assert done.returncode == 0, done.stderr
    replies = done.stdout.splitlines()
    assert [r.split(" ")[0] for r in replies] == ["PONG", "OK", "OK", "OK"]
    assert '"name":"x"' in replies[3]


def test_send_says_when_a_reply_was_an_error(server: ServerProcess) -> None:
    done = omniq("send", "--port", str(server.port), stdin="NOPE\nPING\n")
    assert (done.returncode, done.stdout) == (3, 'ERR {"msg":"unknown verb NOPE"}\nPONG {}\n')


def test_send_says_when_there_is_no_server(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"PING\n")))
    assert run_send("127.0.0.1", 1, None, False, None, patience_s=0.1) == 1
    assert capfd.readouterr().err == (
        "omniq: cannot connect to 127.0.0.1:1: Connection refused, tried for 0.1 s: does omniq serve run there, on that port?\n"
    )


def test_send_waits_for_a_server_that_does_not_listen_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    ended: list[int] = []
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))  # whoever connects is refused until it listens
        port = listener.getsockname()[1]
        sending = threading.Thread(target=lambda: ended.append(run_send("127.0.0.1", port, None, False, None, patience_s=20)))
        sending.start()
        sending.join(0.2)
        assert sending.is_alive()
        listener.listen()
        listener.accept()[0].close()
        sending.join(20)
    assert ended == [0]


def test_send_does_not_try_again_what_stays_wrong() -> None:
    begun = time.monotonic()
    done = omniq("send", "--host", "no.such.host.invalid", stdin="PING\n")
    assert done.returncode == 1
    assert "cannot connect to no.such.host.invalid:12345" in done.stderr
    assert "tried for" not in done.stderr
    assert time.monotonic() - begun < 30


def test_send_says_when_the_server_goes_away(tmp_path: Path) -> None:
    server = ServerProcess("memory://", tmp_path).ready()
    command = [sys.executable, "-m", "omniq", "send", "--port", str(server.port)]
    with Python(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("PING\n")
        process.stdin.flush()
        assert process.stdout.readline() == "PONG {}\n"
        process.stdin.write('FETCH {"timeout":"20s"}\n')
        process.stdin.flush()
        time.sleep(0.3)
        server.kill()
        process.stdin.close()
        assert process.wait(10) == 1


def test_send_says_when_lines_are_left_over(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "omniq", "send", "--port", str(server.port)]
    with Python(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("QUIT\n")
        process.stdin.flush()
        assert process.stdout.readline() == "OK {}\n"
        try:
            with contextlib.suppress(BrokenPipeError):
                while process.poll() is None:
                    process.stdin.write('PUSH {"name":"x","queue":"left"}\n')
                    process.stdin.flush()
        finally:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        assert process.wait(10) == 1


def test_send_reads_replies_while_it_sends(server: ServerProcess) -> None:
    """More than all buffers hold, in both directions at once."""
    large = "x" * 60_000
    lines = [f'PUSH {{"name":"x","queue":"large","payload":"{large}"}}'] * 300
    lines += ['FETCH {"queues":["large"]}'] * 300 + [f"PING {large}"] * 400
    done = omniq("send", "--port", str(server.port), stdin="\n".join(lines))
    assert (done.returncode, done.stdout.count("\n")) == (0, len(lines)), done.stderr


def test_send_with_wrong_usage() -> None:
    assert omniq("send", "--port", "0").returncode == 2
    assert omniq("send", "--nonsense").returncode == 2
    assert omniq("send", "--token-file", "missing", stdin="PING\n").returncode == 2


def test_send_refuses_a_terminal() -> None:
    leader, follower = os.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "omniq", "send"], stdin=follower, capture_output=True, text=True, timeout=30
        )
    finally:
        os.close(leader)
        os.close(follower)
    assert done.returncode == 2
    assert "give commands on stdin" in done.stderr


def test_send_stays_alive_while_stdin_is_quiet(server: ServerProcess) -> None:
    command = [sys.executable, "-m", "omniq", "send", "--port", str(server.port)]
    with Python(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("PING\n")
        process.stdin.flush()
        assert process.stdout.readline() == "PONG {}\n"
        time.sleep(3.5)
        process.stdin.write("PING\n")
        process.stdin.close()
        assert process.stdout.read() == "PONG {}\n"
        assert process.wait(10) == 0


def test_a_server_is_reached_by_its_host_name(server: ServerProcess) -> None:
    with socket.create_connection(("localhost", server.port), 10) as connection:
        connection.sendall(b"PING\n")
        assert connection.recv(100) == b"PONG {}\n"
