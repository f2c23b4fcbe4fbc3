"""Many connections of one process: `python fault_many_clients.py PORT COUNT`. Reads words on stdin, answers each on stdout.

`open` connects all and sends a PING each; `fetch` lets all wait for a task; `close` closes all at once.
"""

import asyncio
import resource
import sys

import uvloop


async def main(port: int, count: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    clients: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    gate = asyncio.Semaphore(200)

    async def connect(number: int) -> None:
        async with gate:
            host = f"127.0.0.{1 + number % 4}"  # one address has too few ports for very many connections
            reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(host, 0))
            writer.write(b"PING\n")
            assert await reader.readline() == b"PONG {}\n"
            clients.append((reader, writer))

    while word := (await asyncio.to_thread(sys.stdin.readline)).strip():
        if word == "open":
            await asyncio.gather(*map(connect, range(count)))
        elif word == "fetch":
            for _, writer in clients:
                writer.write(b'FETCH {"queues":["many"],"timeout":"44s"}\n')
        elif word == "close":
            for _, writer in clients:
                writer.transport.abort()
        print(word, flush=True)


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1]), int(sys.argv[2])))
