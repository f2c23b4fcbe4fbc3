"""Much at once, and much that waits: order is kept, nothing is lost, and time does not grow with what lies in the store."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.tcp import STORES, Peer, ServerProcess, redis_for_all
from support.waiting import wait_for


@pytest.fixture(scope="module", autouse=True)
def redis_of_this_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with redis_for_all(tmp_path_factory.mktemp("redis")):
        yield


@pytest.fixture(params=STORES)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServerProcess]:
    started = ServerProcess(STORES[request.param].url(tmp_path), tmp_path).ready()
    yield started
    started.end()


def test_thousands_of_mixed_commands_are_answered_in_order(server: ServerProcess) -> None:
    rounds = 1500
    with Peer(server.address) as peer:
        lines = ['PUSH {"name":"x","queue":"a","payload":%d}', "PING", "NOPE", 'FETCH {"queues":["a"]}', 'PUSH {"name":"y"}']
        peer.write("".join("\n".join(lines) % n + "\n" for n in range(rounds)).encode() + b"INFO\n")
        for n in range(rounds):
            assert peer.recv().startswith('OK {"id":')
            assert peer.recv() == "PONG {}"
            assert peer.recv().startswith("ERR")
            assert peer.recv().endswith(f'"payload":{n}}}')
            assert peer.recv().startswith('OK {"id":')
        assert f'"ready":0,"delayed":0,"to_ack":{rounds}' in peer.recv()


def test_tasks_whose_reply_was_never_sent_cost_no_attempt(server: ServerProcess) -> None:
    with Peer(server.address) as witness:
        payload = "x" * 60_000
        for _ in range(10):
            witness.write((f'PUSH {{"name":"x","retry":0,"payload":"{payload}"}}\n' * 20).encode())
            assert {witness.recv()[:2] for _ in range(20)} == {"OK"}
        deaf = Peer(server.address, deaf=True)
        deaf.send(*["FETCH"] * 200)
        wait_for(lambda: '"ready":200' not in witness.ask("INFO"))
        deaf.reset()

        def counts() -> tuple[int, int]:
            found = re.search(r'"ready":(\d+),"delayed":0,"to_ack":(\d+)', witness.ask("INFO"))
            return (int(found[1]), int(found[2])) if found else (0, 1)

        wait_for(lambda: counts()[1] == 0)
        ready, _ = counts()
        assert ready > 20, "most replies were still in this process, so most tasks have lost nothing"
        assert '"failures"' not in witness.ask("FETCH")


def test_delayed_tasks_are_stored_as_quickly_beside_many_others(server: ServerProcess) -> None:
    def push(first_day: int) -> float:
        days = [f"{2030 + n // 336}-{1 + n // 28 % 12:02d}-{1 + n % 28:02d}" for n in range(first_day, first_day - 4000, -1)]
        lines = "".join(f'PUSH {{"name":"x","execute_at":"{day}T00:00:00Z"}}\n' for day in days)
        begun = time.monotonic()
        peer.write(lines.encode())
        for _ in days:
            assert peer.recv(30).startswith("OK")
        return time.monotonic() - begun

    with Peer(server.address) as peer:
        took = [push(20_000 - 4000 * n) for n in range(5)]
    assert min(took[3:]) < 5 * min(took[:2]), f"seconds for each 4,000: {took}"


def test_files_do_not_pile_up(tmp_path: Path) -> None:
    server = ServerProcess(f"sqlite:///{tmp_path}/q.db?durability=process", tmp_path).ready()
    try:
        with Peer(server.address) as peer:
            for _ in range(10):
                peer.write((f'PUSH {{"name":"x","payload":"{"x" * 20_000}"}}\n' * 100).encode())
                assert {peer.recv()[:2] for _ in range(100)} == {"OK"}
            for _ in range(200):
                number = re.findall(r'"id":(\d+)', peer.ask("FETCH"))[0]
                assert peer.ask(f'ACK {{"id":{number}}}') == "OK {}"
        files = [path for path in tmp_path.iterdir() if path.name.startswith("q.db")]
        assert len(files) <= 6, files
        assert sum(path.stat().st_size for path in files if path.is_file()) < 120_000_000
    finally:
        server.end()


def test_two_servers_on_one_store_wake_each_other(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/q.db"
    (tmp_path / "other").mkdir()
    servers = [ServerProcess(url, tmp_path).ready(), ServerProcess(url, tmp_path / "other").ready()]
    try:
        with Peer(servers[0].address) as one, Peer(servers[1].address) as other:
            for number in range(1, 6):
                one.send('FETCH {"timeout":"10s"}')
                assert one.silent_for(0.05)
                assert other.ask('PUSH {"name":"x"}') == f'OK {{"id":{number}}}'
                assert one.recv(1.0).startswith(f'OK {{"id":{number},')
            servers[0].kill()
            assert other.ask('FETCH {"timeout":"10s"}', within_s=2).startswith('OK {"id":')
    finally:
        for server in servers:
            server.end()


def test_the_load_of_the_benchmarks_plays_its_scripts(server: ServerProcess, repository: Path) -> None:
    script = """
import sys
from benchmarks.tcp_load import LineProtocol, fetch_and_ack, play, push_all
line, address = LineProtocol(), ("127.0.0.1", int(sys.argv[1]))
play(address, [push_all(line.push, 10, 20) for _ in range(4)])
play(address, [push_all(line.push_atomic, 5, 20) for _ in range(4)])
play(address, [fetch_and_ack(line, 10, 20) for _ in range(4)])
play(address, [fetch_and_ack(line, 50, 1) for _ in range(4)])
"""
    subprocess.run([sys.executable, "-c", script, str(server.port)], cwd=repository, check=True, timeout=60)
    with Peer(server.address) as peer:
        assert '"name":"bench","ready":200,"delayed":0,"to_ack":0' in peer.ask("INFO")


def test_a_client_that_reads_nothing_misses_its_heartbeat(tmp_path: Path) -> None:
    server = ServerProcess("memory://", tmp_path, ["--heartbeat", "500ms", "--metrics-port", "0"]).ready()
    try:
        with Peer(server.address, deaf=True) as deaf, Peer(server.address) as witness:
            for _ in range(30):
                deaf.socket.settimeout(0.2)
                try:
                    deaf.write(b"NOPE\n" * 50_000)
                except (TimeoutError, ConnectionError):  # it reads no more, or has closed already
                    break
            wait_for(lambda: witness.ask("PING") == "PONG {}" and server.metric("omniq_server_missed_heartbeats_total") == 1)
            wait_for(lambda: witness.ask("PING") == "PONG {}" and server.metric("masenko_clients_total") == 1)
    finally:
        server.end()


def test_a_slow_reader_gets_every_reply_once(server: ServerProcess) -> None:
    payload = "x" * 50_000
    with Peer(server.address, deaf=True) as peer:
        for n in range(100):
            assert peer.ask(f'PUSH {{"name":"x","payload":"{n}-{payload}"}}').startswith("OK")
        peer.send(*["FETCH"] * 100, *["PING"] * 3000, "INFO")
        time.sleep(0.3)
        for n in range(100):
            assert f'"payload":"{n}-x' in peer.recv()[:80]
        assert {peer.recv() for _ in range(3000)} == {"PONG {}"}
        assert '"to_ack":100' in peer.recv()
        assert peer.silent_for(0.1)
