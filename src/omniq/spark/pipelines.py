"""A project of Spark Declarative Pipelines with the tables of the lake: written from a template, and run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from omniq.errors import ConfigError, Invalid
from omniq.spark.address import anchored
from omniq.spark.java import find_java, launcher
from omniq.spark.packages import require_extra

_TEMPLATE = Path(__file__).with_name("template")
# The default of Spark Connect, and the only port that `spark-pipelines` knows.
PORT = 15002
_FILES = ("spark-pipeline.yml", "conf/spark-defaults.conf", "transformations/history.py")


def write_project(folder: str | Path, url: str) -> list[Path]:
    """Write the project into a new or empty folder and return its files. Its tables will lie in `spark-warehouse` there."""
    root = Path(folder).absolute()
    if root.exists() and any(root.iterdir()):
        raise Invalid(f"{root} is not empty: name an empty folder or a new one")
    values = {
        "name": root.name,
        "storage": f"file://{root / 'storage'}",
        # It becomes the text of a Python string; absolute, because the server runs in the folder of the project.
        "url": anchored(url).replace("\\", "\\\\").replace('"', '\\"'),
    }
    written: list[Path] = []
    for name in _FILES:
        text = (_TEMPLATE / name).read_text()
        for key, value in values.items():
            text = text.replace("{" + key + "}", value)
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        written.append(target)
    (root / "storage").mkdir()
    return written


def run_project(folder: str | Path, *, java: str = "auto", refresh: bool = False) -> int:
    """Run the pipeline of a project with `spark-pipelines`, which listens on the loopback only, and return its exit code."""
    require_extra()
    root = Path(folder).absolute()
    if not (root / "spark-pipeline.yml").exists():
        raise ConfigError(f"no spark-pipeline.yml in {root}: make a project with omniq lake pipeline init")
    import pyspark

    home = Path(pyspark.__file__).parent
    _must_be_free(PORT)
    command = [str(home / "bin" / "spark-pipelines"), "run"]
    environment = {
        **os.environ,
        "JAVA_HOME": str(launcher(find_java(java))),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "SPARK_HOME": str(home),
        "SPARK_CONF_DIR": str(root / "conf"),
    }
    arguments = [*command, "--full-refresh-all"] if refresh else command
    return subprocess.run(arguments, cwd=root, env=environment, check=False).returncode  # noqa: S603


def _must_be_free(port: int) -> None:
    """Raise `ConfigError` when the port is taken: `spark-pipelines` would wait for ever, or talk to the server that has it."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as exc:
            raise ConfigError(
                f"port {port} is in use ({exc.strerror}): stop the server of Spark Connect that listens there"
            ) from exc
