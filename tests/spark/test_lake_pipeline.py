"""The lake's tables as a declarative pipeline: written, run twice, and read by DuckDB."""

import ast
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import duckdb
import pytest
from support.jobs import echo

from omniq import OmniQ, SQLiteStorage
from omniq.errors import ConfigError, Invalid
from omniq.spark.address import anchored
from omniq.spark.lake.tables import TABLES
from omniq.spark.pipelines import PORT, run_project, write_project


def test_a_project_names_the_store_and_every_table(tmp_path: Path) -> None:
    written = write_project(tmp_path / "history", f'sqlite:///{tmp_path}/a "store".db')
    assert [path.name for path in written] == ["spark-pipeline.yml", "spark-defaults.conf", "history.py"]
    code = written[-1].read_text()
    compile(code, "history.py", "exec")
    (line,) = re.findall(r"^URL = (.*?)  #", code, re.MULTILINE)
    assert ast.literal_eval(line) == anchored(f'sqlite:///{tmp_path}/a "store".db')
    assert {name for name in TABLES if name != "payloads"} == set(re.findall(r"^def (\w+)\(", code, re.MULTILINE))
    assert "{" not in written[0].read_text() + written[1].read_text()
    assert "spark.connect.grpc.binding.address 127.0.0.1" in written[1].read_text()


def test_a_folder_with_other_things_becomes_no_project_and_an_empty_one_does_not_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="omniq lake pipeline init"):
        run_project(tmp_path)
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(Invalid, match="is not empty"):
        write_project(tmp_path, "sqlite:///q.db")


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    write_project(tmp_path, "sqlite:///q.db")
    with socket.socket() as held:
        with suppress(OSError):  # somebody else may have it already
            held.bind(("127.0.0.1", PORT))
            held.listen()
        with pytest.raises(ConfigError, match=f"port {PORT} is in use"):
            run_project(tmp_path)


def trade(folder: Path, count: int) -> None:
    with OmniQ(SQLiteStorage(folder / "q.db")) as oq:
        oq.enqueue_many(echo, [(n,) for n in range(count)])
        with oq.worker() as pool:
            pool.drain()


def asked(project: Path, table: str, sql: str) -> list[Any]:
    files = f"read_parquet('{project}/spark-warehouse/{table}/**/*.parquet')"
    return duckdb.sql(sql.format(files=files)).fetchall()


def listening(pid: int) -> set[str]:
    """Addresses on which a process and its children accept connections, as /proc has them."""
    inodes: set[str] = set()
    family = [pid]
    for parent in family:
        with suppress(OSError):  # it ended meanwhile
            children = Path(f"/proc/{parent}/task").glob("*/children")
            family += [int(child) for path in children for child in path.read_text().split()]
            for handle in Path(f"/proc/{parent}/fd").iterdir():
                with suppress(OSError):
                    inodes.add(os.readlink(handle).removeprefix("socket:[").rstrip("]"))
    found: set[str] = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                found.add(words[1].rpartition(":")[0])
    return found


@pytest.mark.slow
@pytest.mark.costly  # it starts Spark, a server of Connect and pipelines several times: two minutes
@pytest.mark.timeout(1200)
def test_the_project_runs_on_the_loopback_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    project = tmp_path / "history"
    command = [sys.executable, "-m", "omniq", "lake", "pipeline"]
    trade(tmp_path, 20)
    subprocess.run([*command, "init", str(project), "--store", f"sqlite:///{tmp_path}/q.db"], check=True, timeout=60)
    for n, tasks in enumerate((20, 30)):
        log = (tmp_path / f"run{n}.log").open("w+")
        run = subprocess.Popen([*command, "run", str(project)], stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        addresses: set[str] = set()
        try:
            while True:
                addresses |= listening(run.pid)
                try:
                    run.wait(0.5)
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if run.poll() is None:
                os.killpg(run.pid, signal.SIGKILL)
            log.seek(0)
            said = log.read()
            log.close()
        assert run.returncode == 0, said[-3000:]
        loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
        assert addresses
        assert addresses <= loopback
        assert asked(project, "events", "select count(*), count(distinct seq) from {files}") == [(3 * tasks, 3 * tasks)]
        assert asked(project, "tasks", "select status, count(*) from {files} group by all") == [("SUCCESS", tasks)]
        assert asked(project, "func_hour", "select sum(runs)::int from {files}") == [(tasks,)]
        trade(tmp_path, 10)
