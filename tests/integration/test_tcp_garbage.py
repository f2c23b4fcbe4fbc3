"""Whatever bytes come, the server goes on, and its memory stays within bounds."""

import random
import socket
import time
from pathlib import Path

from support.garbage import corpus, mutated
from support.tcp import Peer, ServerProcess

SECONDS = 3.0
MIB = 1024


def rss_mib(server: ServerProcess) -> float:
    status = Path(f"/proc/{server.popen.pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:")) / MIB


def test_mutated_commands_end_no_server(tmp_path: Path) -> None:
    server = ServerProcess("memory://", tmp_path, ["--heartbeat", "500ms"]).ready()
    chance = random.Random(5)
    lines = corpus()
    try:
        with Peer(server.address) as witness:
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                with socket.create_connection(server.address, 10) as connection:
                    connection.settimeout(0.02)
                    for _ in range(20):
                        data = b"".join(mutated(lines, chance) + b"\n" for _ in range(50))
                        try:
                            connection.sendall(data)
                            connection.recv(1 << 20)
                        except (TimeoutError, ConnectionError):
                            break
                assert witness.ask("PING") == "PONG {}"
        assert "Traceback" not in server.errors, server.errors
        assert server.stop() == 0
    finally:
        server.end()


def stuff(peer: Peer, data: bytes, times: int) -> None:
    """Send until the server reads no more."""
    peer.socket.settimeout(0.5)
    try:
        for _ in range(times):
            peer.write(data)
    except TimeoutError:
        pass


def test_commands_that_wait_behind_others_do_not_fill_the_memory(tmp_path: Path) -> None:
    server = ServerProcess("memory://", tmp_path).ready()
    try:
        with Peer(server.address) as waiting, Peer(server.address) as other:
            assert other.ask("PING") == "PONG {}"
            before = rss_mib(server)
            waiting.send('FETCH {"timeout":"40s"}')
            stuff(waiting, b"PING " + b"x" * 1_000_000 + b"\n", 100)
            assert rss_mib(server) - before < 30
            assert other.ask('PUSH {"name":"x"}') == 'OK {"id":1}'
            assert waiting.recv() == 'OK {"id":1,"queue":"default","name":"x"}'
            assert waiting.recv() == "PONG {}"
    finally:
        server.end()


def test_endless_lines_and_transactions_do_not_fill_the_memory(tmp_path: Path) -> None:
    server = ServerProcess("memory://", tmp_path).ready()
    try:
        with Peer(server.address) as endless, Peer(server.address) as atomic, Peer(server.address) as deaf:
            assert endless.ask("PING") == "PONG {}"
            before = rss_mib(server)
            for _ in range(60):
                endless.write(b"x" * (1 << 20))
            atomic.send("ATOMIC")
            for _ in range(60):
                atomic.write((b'PUSH {"name":"x","payload":"' + b"x" * 10_000 + b'"}\n') * 100)
            stuff(deaf, b"NOPE\n" * 200_000, 60)  # and never reads a reply
            assert rss_mib(server) - before < 60
            assert endless.ask("", within_s=30).startswith('ERR {"msg":"line is longer than max-line')
            assert "max-transaction-bytes" in atomic.ask("DONE", within_s=30)
    finally:
        server.end()
