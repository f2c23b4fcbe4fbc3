"""A TCP server killed at every step of a command: nothing acknowledged is lost, nothing is doubled, the store opens again."""

import contextlib
import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fault_processes import HERE, Fleet, until
from support.tcp import Peer, ServerProcess

from omniq import OmniQ, TaskStatus

ROUNDS = int(os.environ.get("ROUNDS") or 20)
STEPS = ["line", "reply", "sent", "before:ids", "after:ids"]
STEPS += [f"{moment}:{kind}" for moment in ("before", "after") for kind in ("Enqueue", "Reserve", "Ack", "Retry")]


class Talk:
    """A client that remembers what it was told."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.peer = Peer(address)
        self.told: dict[str, Any] = {}

    def say(self, what: str, *lines: str) -> Any:
        """The reply's object, or None once the server is gone."""
        try:
            reply = self.peer.ask(*lines)
        except OSError:
            reply = "CLOSED"
        if reply == "CLOSED":
            raise ConnectionError(what)
        self.told[what] = json.loads(reply.partition(" ")[2])
        return self.told[what]


def push(key: str) -> str:
    return f'PUSH {{"name":"x","idempotency_key":"{key}","payload":"{key}"}}'


def converse(talk: Talk) -> None:
    """PUSH, FETCH, ACK; PUSH, FETCH, NACK; and a transaction that acknowledges one task and pushes another."""
    talk.say("push a", push("a"))
    fetched = talk.say("fetch a", "FETCH")
    talk.say("ack a", f'ACK {{"id":{fetched["id"]}}}')
    talk.say("push b", push("b"))
    fetched = talk.say("fetch b", "FETCH")
    talk.say("nack b", f'NACK {{"id":{fetched["id"]}}}')
    talk.say("push c", push("c"))
    fetched = talk.say("fetch c", "FETCH")
    talk.say("atomic", "ATOMIC", f'ACK {{"id":{fetched["id"]}}}', push("d"), "DONE")


@pytest.mark.parametrize("count", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 5))])
@pytest.mark.parametrize("step", STEPS)
def test_a_server_killed_at_a_step_loses_and_doubles_nothing(fleet: Fleet, step: str, count: int) -> None:
    crashing = fleet.start("crashing", str(HERE / "fault_crashing_server.py"), str(fleet.store), step, str(count))
    until(lambda: crashing.lines or not crashing.running, "the server to listen")
    if crashing.lines:
        talk = Talk(("127.0.0.1", int(crashing.lines[0].split()[1])))
        with contextlib.suppress(ConnectionError):
            converse(talk)
        talk.peer.close()
        told = talk.told
    else:
        told = {}
    if crashing.running:
        crashing.kill()
    assert crashing.popen.wait(10) == -signal.SIGKILL, crashing.errors
    server = ServerProcess(fleet.url, fleet.folder).ready()
    try:
        check_promises(server, fleet, told)
    finally:
        server.end()


def check_promises(server: ServerProcess, fleet: Fleet, told: dict[str, Any]) -> None:
    with Peer(server.address) as peer:
        for key in "abcd":
            again = json.loads(peer.ask(push(key)).partition(" ")[2])
            if key != "d" and f"push {key}" in told:
                assert again["id"] == told[f"push {key}"]["id"]
            if key == "d" and "atomic" in told:
                assert [again["id"]] == told["atomic"]["ids"]
        done = []
        while len(done) < 4:
            reply = peer.ask('FETCH {"timeout":"1200ms"}')
            if reply == "EMPTY {}":
                break
            task = json.loads(reply[3:])
            done.append(task["payload"])
            assert peer.ask(f'ACK {{"id":{task["id"]}}}') == "OK {}"
            if "nack b" not in told:
                assert task.get("failures", 0) <= 1
    assert len(set(done)) == len(done)
    assert not ("ack a" in told and "a" in done), "it was acknowledged"
    assert not ("atomic" in told and "c" in done), "it was acknowledged in a transaction"
    with OmniQ.from_url(fleet.url) as oq:
        tasks, _ = oq.find()
        assert sorted(t.idempotency_key or "" for t in tasks) == ["a", "b", "c", "d"]
        assert {t.status for t in tasks} == {TaskStatus.SUCCESS}


class Loader(threading.Thread):
    """Pushes with keys, fetches and acknowledges, and connects again whenever the server is gone."""

    def __init__(self, server: ServerProcess, number: int) -> None:
        super().__init__(name=f"loader-{number}")
        self._server, self._number = server, number
        self.stop = threading.Event()
        self.pushed: dict[str, int] = {}
        self.acked: list[tuple[int, float]] = []
        self.fetched: list[tuple[int, float]] = []
        self.broken: list[str] = []

    def run(self) -> None:
        keys = 0
        while not self.stop.is_set():
            try:
                with Peer(self._server.address, 2) as peer:
                    while not self.stop.is_set():
                        key = f"{self._number}-{keys}"
                        number = self._object(peer, push(key))["id"]
                        if self.pushed.setdefault(key, number) != number:
                            self.broken.append(f"key {key} gave {self.pushed[key]} and {number}")
                        keys += 1
                        self._fetch_and_ack(peer)
            except (OSError, AssertionError):
                time.sleep(0.02)

    def _fetch_and_ack(self, peer: Peer) -> None:
        begun = time.monotonic()
        task = self._object(peer, 'FETCH {"timeout":"10ms"}')
        if task:
            self.fetched.append((task["id"], begun))
            if self._object(peer, f'ACK {{"id":{task["id"]}}}') == {}:
                self.acked.append((task["id"], time.monotonic()))

    @staticmethod
    def _object(peer: Peer, line: str) -> Any:
        reply = peer.ask(line, within_s=5)
        if reply == "CLOSED":
            raise ConnectionError
        return json.loads(reply.partition(" ")[2])


@pytest.mark.slow
def test_a_server_killed_again_and_again_keeps_its_promises(tmp_path: Path) -> None:
    dice = random.Random()
    url = f"sqlite:///{tmp_path}/queue.db"
    server = ServerProcess(url, tmp_path).ready()
    loaders = [Loader(server, number) for number in range(4)]
    try:
        for loader in loaders:
            loader.start()
        for _ in range(ROUNDS):
            time.sleep(dice.uniform(0.2, 1.0))
            server.kill()
            server.restart()
        time.sleep(0.5)
    finally:
        for loader in loaders:
            loader.stop.set()
        for loader in loaders:
            loader.join()
        code = server.stop()
    assert code == 0, server.errors
    assert [b for loader in loaders for b in loader.broken] == []
    pushed = {key: number for loader in loaders for key, number in loader.pushed.items()}
    acked = dict(pair for loader in loaders for pair in loader.acked)
    assert len(pushed) > 10 * ROUNDS
    assert len(set(pushed.values())) == len(pushed), "an id was given twice"
    again = [n for loader in loaders for n, begun in loader.fetched if n in acked and begun > acked[n]]
    assert again == [], "acknowledged tasks were handed out again"
    with OmniQ.from_url(url) as oq:
        there = {t.idempotency_key: t for t in _all_tasks(oq)}
        assert len(there) >= len(pushed)
        for key, number in pushed.items():
            assert there[key].id == str(number)
        ended = {int(t.id) for t in there.values() if t.status is TaskStatus.SUCCESS}
        assert acked.keys() <= ended


def _all_tasks(oq: OmniQ) -> list[Any]:
    found: list[Any] = []
    cursor = None
    while True:
        page, cursor = oq.find(cursor=cursor, limit=1000)
        found += page
        if cursor is None:
            return found
