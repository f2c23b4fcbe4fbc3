"""The published client and ours, called with the same keywords."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omniq.contract import ContractClient

SUPPORT = Path(__file__).parent


def guest_command(python: str, port: int, *arguments: str) -> list[str]:
    """-E: our own package, which has the same name, is not on its path."""
    return [python, "-E", str(SUPPORT / "guest_side.py"), str(port), *arguments]


class Theirs:
    """The published client in a process of its own."""

    def __init__(self, python: str, port: int) -> None:
        self._process = subprocess.Popen(guest_command(python, port), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(**arguments: Any) -> Any:
            stdin, stdout = self._process.stdin, self._process.stdout
            assert stdin is not None
            assert stdout is not None
            stdin.write(json.dumps({"method": method, "arguments": arguments}) + "\n")
            stdin.flush()
            answer = json.loads(stdout.readline())
            if "error" in answer:
                raise RuntimeError(answer["error"])
            return answer["ok"]

        return call

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Ours:
    """Our client."""

    def __init__(self, url: str) -> None:
        self.client = ContractClient.from_url(url)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return getattr(self.client, method)

    def close(self) -> None:
        self.client.close()
