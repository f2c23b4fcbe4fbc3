"""Cases of the line protocol as plain text, one behaviour each.

    # What is shown; the first line of the file.
    server --heartbeat 1s              options of the server (first lines only); `own server`: one that this case may kill;
                                       `order of time`: not on stores whose order is that of arrival;
                                       `default store`: one of its own, without --store, and only once
    client-a send PUSH {"name":"x"}    a line out; names of clients are free, each is a connection of its own
    client-a recv OK {"id":<a>}        a line back, exactly; <a> remembers a number, or must be the one remembered; <a+1> adds
    client-a info {q} ready=1 …        sends INFO and compares one queue; `client-a info {q} absent`
    client-a send*3 …, recv*3 …        three times
    client-a bytes PING\\r\\n            bytes with escapes, without a line end
    client-a silent 300ms              nothing comes for so long
    client-a recv within 300ms …       not later than that
    client-a close | shut | reset      leave; stop sending; break the connection
    client-a recv CLOSED               the server has closed the connection
    server kill | restart | term | int SIGKILL; start again on the same store and port; SIGTERM; SIGINT
    server tear | ended                a write of the killed server was cut off; it has ended in good order
    server has omniq.db                that file is in its working folder
    server folder 30 files 12MB        its working folder has no more than that
    server metric NAME 2               its metrics say so
    server rests 1s                    it computes less than a tenth of that time
    server spent <a>                   remembers the processor time since the last such step
    server spent 3 times <a>           no more than that
    server backup | restore            `omniq backup` while it runs; the copy takes the place of the killed server's store
    wait 1s                            let time pass (only where time itself is the subject)

`{q}` is a queue name of this case's own, `{x*100}` a hundred x, `{transaction*9}` nine pushes between ATOMIC and DONE
(`{transaction*9 "retry":0}` with attributes), `{acks*9}` the ACKs of 1 to 9 (`{acks*9 from 4}` of 4 to 12), `{in 300ms}` that
moment as RFC 3339, `…` anything.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import cast

import msgspec

from omniq.durations import parse_duration
from support.tcp import Peer, ServerProcess, Store


class Step(msgspec.Struct, frozen=True):
    number: int
    who: str
    what: str
    rest: str


class Case(msgspec.Struct, frozen=True):
    name: str
    title: str
    options: tuple[str, ...]
    own_server: bool
    by_time: bool
    default_store: bool
    steps: list[Step]


def read_case(path: Path) -> Case:
    lines = path.read_text().splitlines()
    assert lines[0].startswith("# "), f"{path.name}: the first line says what is shown"
    options: tuple[str, ...] = ()
    own = by_time = default = False
    steps: list[Step] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        if line.startswith("server --"):
            options = tuple(line.split()[1:])
        elif line == "own server":
            own = True
        elif line == "order of time":
            by_time = True
        elif line == "default store":
            own = default = True
        else:
            who, _, action = line.partition(" ")
            what, _, rest = action.partition(" ")
            steps.append(Step(number, who, what, rest))
    return Case(path.stem, lines[0][2:], options, own, by_time, default, steps)


def needs_linux(case: Case) -> bool:
    """Whether it asks for the processor time of the server."""
    return any(step.who == "server" and step.what in ("rests", "spent") for step in case.steps)


def needs_files(case: Case) -> bool:
    """Whether it is about a store that is made of files."""
    return any(step.who == "server" and step.what == "backup" for step in case.steps)


def read_cases(folder: Path) -> list[Case]:
    return [read_case(path) for path in sorted(folder.glob("*.txt"))]


class CaseRun:
    """Plays a case against a server."""

    def __init__(self, case: Case, server: ServerProcess, store: Store, queue: str) -> None:
        self._case, self._server, self._store, self._queue = case, server, store, queue
        self._peers: dict[str, Peer] = {}
        self._numbers: dict[str, int] = {}
        self._times: dict[str, float] = {}
        self._cpu_s = 0.0

    def play(self) -> None:
        try:
            for step in self._case.steps:
                try:
                    self._do(step)
                except AssertionError as exc:
                    raise AssertionError(f"{self._case.name}.txt:{step.number}: {exc}") from None
        finally:
            for peer in self._peers.values():
                peer.close()

    def _do(self, step: Step) -> None:
        if step.who == "wait":
            time.sleep(_seconds(step.what))
        elif step.who == "server":
            self._server_does(step.what, self._fill(step.rest, numbers=False).split())
        else:
            what, _, times = step.what.partition("*")
            for _ in range(int(times or 1)):
                self._client_does(step.who, what, step.rest)

    def _server_does(self, what: str, rest: list[str]) -> None:
        if what in ("has", "folder", "metric", "rests", "spent"):
            getattr(self, f"_{what}")(*rest)
        elif what == "backup":
            self._server.command("backup", "copy")
        elif what == "restore":
            self._restore()
        elif what == "int":
            self._server.signal(signal.SIGINT)
        elif what == "kill":
            self._server.kill()
        elif what == "restart":
            self._server.restart()
        elif what == "term":
            self._server.signal(signal.SIGTERM)
        elif what == "tear":
            self._store.tear(self._server.folder)
        else:
            assert what == "ended", f"a server cannot {what!r}"
            assert self._server.popen.wait(10) == 0, self._server.errors

    def _has(self, name: str) -> None:
        assert (self._server.folder / name).exists(), f"there are {[p.name for p in self._server.folder.iterdir()]}"

    def _folder(self, files: str, _: str, size: str) -> None:
        found = [path for path in self._server.folder.rglob("*") if path.is_file()]
        weight = sum(path.stat().st_size for path in found)
        assert len(found) <= int(files), [path.name for path in found]
        assert weight <= int(size.removesuffix("MB")) * 1_000_000, f"{weight} bytes"

    def _metric(self, name: str, wanted: str) -> None:
        found = self._server.metric(name)
        assert found == float(wanted), f"expected {wanted}, got {found}"

    def _rests(self, duration: str) -> None:
        before = self._server.cpu_s()
        time.sleep(_seconds(duration))
        spent = self._server.cpu_s() - before
        assert spent < _seconds(duration) / 10, f"it computed for {spent} s"

    def _spent(self, *wanted: str) -> None:
        now = self._server.cpu_s()
        spent, self._cpu_s = now - self._cpu_s, now
        if len(wanted) == 1:
            self._times[wanted[0]] = spent
        else:
            limit = int(wanted[0]) * self._times[wanted[2]]
            assert spent <= limit, f"{spent} s, more than {limit} s"

    def _restore(self) -> None:
        folder, place = self._server.folder, cast(str, self._store.place)
        for name in (place, f"{place}-wal", f"{place}-shm"):
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        (folder / "copy").rename(folder / place)

    def _client_does(self, who: str, what: str, rest: str) -> None:
        if who not in self._peers:
            self._peers[who] = Peer(self._server.address)
        peer = self._peers[who]
        if what == "send":
            peer.send(self._fill(rest))
        elif what == "bytes":
            peer.write(self._fill(rest).encode().decode("unicode_escape").encode("latin-1"))
        elif what == "recv":
            self._receive(peer, rest)
        elif what == "info":
            self._info(peer, rest)
        elif what == "silent":
            assert peer.silent_for(_seconds(rest)), f"a line came: {peer.recv()}"
        elif what in ("close", "shut", "reset"):
            getattr(peer, what)()
            if what != "shut":
                del self._peers[who]
        else:
            raise AssertionError(f"a client cannot {what!r}")

    def _receive(self, peer: Peer, wanted: str) -> None:
        within = re.match(r"within (\S+) ", wanted)
        got = peer.recv(_seconds(within[1])) if within else peer.recv()
        wanted = wanted[within.end() :] if within else wanted
        pattern = re.split(r"(<\w+(?:\+\d+)?>|…)", self._fill(wanted, numbers=False))
        parts = [r"(\d+)" if part.startswith("<") else ".*" if part == "…" else re.escape(part) for part in pattern]
        found = re.fullmatch("".join(parts), got)
        assert found, f"expected {wanted[:300]}\n     got {got[:300]}"
        for name, number in zip([part for part in pattern if part.startswith("<")], found.groups(), strict=True):
            if name[1:-1].isalnum():
                self._numbers.setdefault(name[1:-1], int(number))
            assert self._number(name) == number, f"expected {name} = {self._number(name)}\n     got {got[:300]}"

    def _info(self, peer: Peer, wanted: str) -> None:
        queue, *counts = self._fill(wanted).split()
        reply = peer.ask("INFO")
        assert reply.startswith("OK "), reply
        found = [q for q in json.loads(reply[3:])["queues"] if q["name"] == queue]
        if counts == ["absent"]:
            assert found == [], found
            return
        expected = {"name": queue} | {k: int(v) for k, v in (c.split("=") for c in counts)}
        assert found == [expected], f"expected {expected}, got {found}"

    def _fill(self, text: str, numbers: bool = True) -> str:
        text = text.replace("{q}", self._queue)
        text = re.sub(r"\{(.)\*(\d+)\}", lambda m: m[1] * int(m[2]), text)
        text = re.sub(r"\{transaction\*(\d+)( .*)?\}$", lambda m: self._transaction(int(m[1]), m[2] or ""), text)
        text = re.sub(r"\{acks\*(\d+)(?: from (\d+))?\}", lambda m: _acks(int(m[1]), int(m[2] or 1)), text)
        text = re.sub(r"\{in (\w+)\}", lambda m: (datetime.now(UTC) + timedelta(seconds=_seconds(m[1]))).isoformat(), text)
        return re.sub(r"<\w+(?:\+\d+)?>", lambda m: self._number(m[0]), text) if numbers else text

    def _transaction(self, pushes: int, more: str) -> str:
        push = f'PUSH {{"name":"x","queue":"{self._queue}"{more and ","}{more}}}'
        return "\n".join(["ATOMIC", *[push] * pushes, "DONE"])

    def _number(self, text: str) -> str:
        found = re.fullmatch(r"<(\w+)(?:\+(\d+))?>", text)
        return text if found is None else str(self._numbers[found[1]] + int(found[2] or 0))


def _acks(number: int, first: int) -> str:
    return "\n".join(f'ACK {{"id":{n}}}' for n in range(first, first + number))


def _seconds(text: str) -> float:
    return parse_duration(text) / 1e9
