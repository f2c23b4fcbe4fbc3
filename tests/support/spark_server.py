"""A server of Spark Connect for tests: on a free port of the loopback, ended by its process id."""

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from omniq.spark.java import find_java, launcher
from omniq.spark.settings import import_path, settings
from support.redis_server import free_port
from support.waiting import wait_for

START_S = 240.0


def environment() -> dict[str, str]:
    """What a program of Spark's needs to find its Java and this Python."""
    python = {"PYSPARK_PYTHON": sys.executable, "PYTHONPATH": os.pathsep.join(import_path())}
    return {**os.environ, "JAVA_HOME": str(launcher(find_java())), **python}


@contextlib.contextmanager
def connect_server(folder: Path) -> Iterator[str]:
    """The address of a server that keeps its files in a folder; a client passes it to `SparkSession.builder.remote`."""
    import pyspark

    port = free_port()
    conf = settings("local[2]", folder, fast_start=True)
    conf |= {"spark.connect.grpc.binding.address": "127.0.0.1", "spark.connect.grpc.binding.port": str(port)}
    words = [word for name, value in conf.items() for word in ("--conf", f"{name}={value}")]
    program = Path(pyspark.__file__).parent / "bin" / "spark-submit"
    main = ["--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"]
    log = folder / "server.log"
    with log.open("ab") as file:
        server = subprocess.Popen([str(program), *words, *main], cwd=folder, env=environment(), stdout=file, stderr=file)
    try:
        wait_for(lambda: server.poll() is not None or _listens(port), within=START_S)
        assert server.poll() is None, log.read_text()
        yield f"sc://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False
