"""The counters of a server, and how Prometheus reads them."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from omniq.errors import ConfigError, OmniQError
from omniq.operations import QueueCounts

if TYPE_CHECKING:
    from omniq.server.server import Server

log = logging.getLogger("omniq.server")

# Prometheus gives up after ten seconds by default: without the counts it still gets the rest.
SCRAPE_S = 5.0


class Tally(msgspec.Struct):
    """Plain counters: they are touched for every command."""

    requests: Counter[str] = msgspec.field(default_factory=Counter[str])
    replies: Counter[str] = msgspec.field(default_factory=Counter[str])
    bytes_in: int = 0
    bytes_out: int = 0
    connections: int = 0
    refused_connections: int = 0
    missed_heartbeats: int = 0

    def count_replies(self, lines: bytes) -> None:
        """Count the replies of a batch at once: a line end never stands inside a reply."""
        left = lines.count(b"\n")
        for word, begin in _OTHERS:
            if number := lines.count(begin) + lines.startswith(begin[1:]):
                self.replies[word] += number
                left -= number
        self.replies["OK"] += left


def start_metrics(server: Server, host: str, port: int) -> tuple[int, Callable[[], None]]:
    """Serve the metrics of a server over HTTP, from a thread. Returns the port, and a function that stops it."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as exc:
        raise ConfigError("metrics need prometheus_client: install omniq with its extra 'serve'") from exc
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(server))
    http, thread = start_http_server(port, addr=host, registry=registry)

    def stop() -> None:
        http.shutdown()
        http.server_close()
        thread.join()

    return http.server_address[1], stop


class _Collector:
    """Reads the counters when it is asked. The tasks per queue come from the store."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        server, tally = self._server, self._server.tally
        yield GaugeMetricFamily("masenko_clients_total", "Connections now.", value=len(server.connections))
        # Verbs that nobody has used yet are shown with 0: a rate needs a first value.
        for name, text, counts, known in (
            ("masenko_requests", "Commands carried out, by verb.", tally.requests, VERBS),
            ("masenko_responses", "Replies sent, by their first word.", tally.replies, WORDS),
        ):
            family = CounterMetricFamily(name, text, labels=["verb"])
            for verb in sorted(known | counts.keys()):
                family.add_metric([verb], counts[verb])
            yield family
        tasks = GaugeMetricFamily("masenko_tasks_total", "Tasks by queue and kind.", labels=["queue", "kind"])
        for queue in self._counts():
            kinds = {"ready": queue.ready, "delayed": queue.scheduled, "toack": queue.running, "blocked": queue.blocked}
            for kind, number in (kinds | {"dead": queue.dead}).items():
                tasks.add_metric([queue.queue, kind], number)
        yield tasks
        held = sum(len(session.held) for session in list(server.connections))
        yield GaugeMetricFamily("omniq_server_held_tasks", "Tasks that clients of this server hold.", value=held)
        yield GaugeMetricFamily(
            "omniq_server_waiting_fetches", "Connections that wait for a task.", value=len(server.engine.lines)
        )
        for name, text, value in (
            ("omniq_server_connections", "Connections accepted.", tally.connections),
            ("omniq_server_refused_connections", "Connections beyond max-connections.", tally.refused_connections),
            ("omniq_server_missed_heartbeats", "Connections closed because they were silent.", tally.missed_heartbeats),
            ("omniq_server_received_bytes", "Bytes received.", tally.bytes_in),
            ("omniq_server_sent_bytes", "Bytes sent.", tally.bytes_out),
            ("omniq_server_turns", "Calls to the store that carried commands.", server.engine.turns),
        ):
            yield CounterMetricFamily(name, text, value=value)

    def _counts(self) -> list[QueueCounts]:
        reading = asyncio.run_coroutine_threadsafe(self._server.storage.counts(), self._loop)
        try:
            return reading.result(SCRAPE_S)
        except (OmniQError, TimeoutError) as exc:
            reading.cancel()
            log.warning("the tasks could not be counted for the metrics: %s", exc)
            return []


VERBS = {"ACK", "ATOMIC", "AUTH", "CANCEL", "EXTEND", "FETCH", "INFO", "NACK", "PING", "PUSH", "QUIT", "RESULT"}
WORDS = {"EMPTY", "ERR", "OK", "PONG"}
_OTHERS = [(word, f"\n{word} ".encode()) for word in sorted(WORDS - {"OK"})]
