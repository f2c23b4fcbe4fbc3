"""Lines that are almost commands: those of the cases, with some bytes changed."""

import random
from pathlib import Path

from support.tcp_cases import read_cases


def corpus() -> list[bytes]:
    folder = Path(__file__).parent.parent / "integration" / "tcp_cases"
    found = {step.rest for case in read_cases(folder) for step in case.steps if step.what.startswith("send")}
    return sorted(line.replace("{q}", "q").encode() for line in found if len(line) < 2000)


def mutated(lines: list[bytes], chance: random.Random) -> bytes:
    """A line of the cases with bytes changed, dropped, doubled, or with a piece of another line inside."""
    data = bytearray(chance.choice(lines))
    for _ in range(chance.randrange(1, 5)):
        place = chance.randrange(len(data) + 1)
        match chance.randrange(5):
            case 0:
                data[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                del data[place : place + chance.randrange(1, 4)]
            case 2:
                data[place:place] = data[place : place + 8]
            case 3:
                other = chance.choice(lines)
                begin = chance.randrange(len(other) + 1)
                data[place:place] = other[begin : begin + 12]
            case _:
                data[place:place] = chance.choice([b"\\u0000", b"9" * 30, b'"', b"{", b"[" * 50, b"\x00", b"\xff", b"null"])
    return bytes(data)
