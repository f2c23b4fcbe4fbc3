"""The nodes of a cluster: which one serves a queue, and connections to each of them.

redis-py knows the nodes, and reads. Calls of the script go over connections of our own: its cluster client tells of a node that
it cannot reach and of an answer that got lost in the same words, and only the second leaves it open what happened.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast

from redis.exceptions import AskError, ClusterDownError, MovedError

from omniq.errors import StoreError, StoreUnavailable

REDIRECTS = 16  # a node that redirects a call has not carried it out
MOVING = "its slot is on its way to another node, and a script would find half of its keys there; try again when it has arrived"

Place = tuple[str, int]


def _redirected(exc: MovedError, place: Place) -> Place:
    # A node may leave its own host out.
    told = cast(Any, exc)
    return told.host or place[0], int(told.port)


class AsyncNodes:
    """For one event loop. `connect` makes the connection pool of a node."""

    def __init__(self, client: Any, connect: Callable[[str, int], Any]) -> None:
        self._client, self._connect = client, connect
        self._pools: dict[Place, Any] = {}
        self.stale = False  # a node failed or redirected: the next call asks for the nodes first

    async def ready(self) -> Any:
        """The client, once it knows the nodes; it asks for them again after one of them failed."""
        await self._client.initialize()
        if self.stale:
            await self._client.nodes_manager.initialize()
            self.stale = False
        return self._client

    async def call(self, key: str, send: Callable[[Any], Awaitable[Any]]) -> Any:
        """Send to the node of a key, or to where it redirects; `send` is given a pool of connections."""
        node = (await self.ready()).get_node_from_key(key)
        place = (str(node.host), int(node.port))
        for _ in range(REDIRECTS):
            try:
                return await send(self._pool(place))
            except MovedError as exc:
                # The node refused the call, so it may be sent to another one.
                self.stale, place = True, _redirected(exc, place)
            except AskError as exc:
                raise StoreUnavailable(f"{key}: {MOVING}") from exc
            except (StoreError, ClusterDownError):
                self.stale = True
                raise
        raise StoreUnavailable(f"the nodes of the cluster do not agree on who serves {key}; try again")

    def _pool(self, place: Place) -> Any:
        if place not in self._pools:
            self._pools[place] = self._connect(*place)
        return self._pools[place]

    async def close(self) -> None:
        for pool in self._pools.values():
            await pool.disconnect()
        self._pools.clear()


class Nodes:
    """The same for threads."""

    def __init__(self, client: Any, connect: Callable[[str, int], Any]) -> None:
        self._client, self._connect = client, connect
        self._pools: dict[Place, Any] = {}
        self.stale = False

    def ready(self) -> Any:
        if self.stale:
            self._client.nodes_manager.initialize()
            self.stale = False
        return self._client

    def execute_command(self, *command: Any) -> Any:
        return self.ready().execute_command(*command)

    def call(self, key: str, send: Callable[[Any], Any]) -> Any:
        node = self.ready().get_node_from_key(key)
        place = (str(node.host), int(node.port))
        for _ in range(REDIRECTS):
            try:
                return send(self._pool(place))
            except MovedError as exc:
                self.stale, place = True, _redirected(exc, place)
            except AskError as exc:
                raise StoreUnavailable(f"{key}: {MOVING}") from exc
            except (StoreError, ClusterDownError):
                self.stale = True
                raise
        raise StoreUnavailable(f"the nodes of the cluster do not agree on who serves {key}; try again")

    def _pool(self, place: Place) -> Any:
        pool = self._pools.get(place)
        return self._pools.setdefault(place, self._connect(*place)) if pool is None else pool  # threads may come together

    def close(self) -> None:
        self._client.close()
        for pool in self._pools.values():
            pool.disconnect()
        self._pools.clear()
