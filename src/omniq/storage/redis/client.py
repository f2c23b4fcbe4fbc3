"""Connections to Redis: a client per event loop, one for threads, and how their failures read in the words of the contract.

`RedisClient.script` is the only way to change something. It sends the hash of the script and, if the server does not know
it (new, flushed or failed over), the script itself. It never sends a call twice: a call that was sent and not answered is
`OutcomeUnknown`, and the caller decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import importlib.resources
import os
import re
import threading
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
import redis.asyncio
from redis.asyncio.cluster import ClusterNode as AsyncClusterNode
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.crc import key_slot
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry
from redis.sentinel import Sentinel

from omniq.errors import ConfigError, Invalid, OutcomeUnknown, StoreError, StoreFull, StoreUnavailable
from omniq.storage.redis.nodes import AsyncNodes, Nodes
from omniq.storage.url import mask, options_of

Command = tuple[Any, ...]

CONNECT_S = 5.0
ANSWER_S = 15.0  # so long a server that accepts a call and is silent may hold it
AT_ONCE = 5000  # commands of one pipeline: the event loop does nothing else while they are packed
AHEAD = 4  # calls that are sent before the answer to the first of them is read

_ALWAYS = ("lanes", "reserve", "plain")
_ON_DEMAND = {
    "books": ("books", "enqueues"),
    "operations": ("ending", "operations"),
    "aside": ("aside",),
    "sweeping": ("sweeping",),
    "purging": ("purging",),
    "checking": ("checking",),
    "restore": ("restore",),
    "fan_in": ("fan_in",),
    "staging": ("staging",),
    "many": ("many",),
}
# A full server refuses the first write of a script if that needs memory, and none that comes after another one.
_ANYWAY = "redis.call('DEL', KEYS[1] .. ':none') return redis.call(unpack(ARGV))"
_LOST = (RedisConnectionError, RedisTimeoutError, OSError, asyncio.TimeoutError)
_FAILED = (RedisError, RedisClusterException)
_RESENDS = 0  # the library's own would send a call twice; what a cluster's node redirects was not carried out and goes on
# What passes: of some the library drops the first word, in which a server says what is the matter, and makes a class of it.
_NOT_NOW = ("READONLY", "LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "NOREPLICAS", "MISCONF", "BUSY")
_NOT_NOW_KINDS = (BusyLoadingError, ReadOnlyError, ClusterDownError, TryAgainError)


def load_script() -> str:
    """The one script of this driver, put together from its parts.

    Lua makes every function of a script anew at each call, so the parts that most calls do without are wrapped in functions.
    The others are nested: a function that refers to the variables of an enclosing one is made much faster.
    """
    folder = importlib.resources.files("omniq.storage.redis") / "lua"

    def read(*parts: str) -> str:
        return "\n".join((folder / f"{part}.lua").read_text("utf-8") for part in parts)

    wrapped = [f"LOAD.{name} = function()\n{read(*parts)}\nend" for name, parts in _ON_DEMAND.items()]
    parts = [read("publish", "keys"), read("tasks"), "\n".join([read(*_ALWAYS), "local LOAD = {}", *wrapped, read("main")])]
    return "\nreturn (function()\n".join(parts) + "\nend)()" * (len(parts) - 1)


SCRIPT = load_script()
# The name by which servers know a script: no matter of security, for which some builds of Python refuse SHA-1.
SHA = hashlib.sha1(SCRIPT.encode(), usedforsecurity=False).hexdigest()


class Target:
    """The place that a URL names: one server, a cluster (`?cluster=1`), or the master of sentinels (`?sentinel=name`)."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss"):
            raise ConfigError(f"storage URL {mask(url)!r}: write redis://host:6379/0 or rediss://host:6379/0")
        query = options_of(url, "cluster", "sentinel")
        if query.get("cluster", "0") not in ("0", "1", "true", "false"):
            raise ConfigError(f"storage URL {mask(url)!r}: cluster is 1 or 0, not {query['cluster']!r}")
        self.url = url
        self.cluster = query.get("cluster") in ("1", "true")
        self.sentinel = query.get("sentinel") or None
        if self.cluster and self.sentinel:
            raise ConfigError(f"storage URL {mask(url)!r}: a cluster has no sentinels; give only one of the two")
        self.username = unquote(parts.username) if parts.username else None
        self.password = unquote(parts.password) if parts.password else None
        self.hosts = [_host(text, 26379 if self.sentinel else 6379, url) for text in _hosts(parts.netloc).split(",")]
        if len(self.hosts) > 1 and not (self.cluster or self.sentinel):
            raise ConfigError(f"storage URL {mask(url)!r} names several hosts: add ?cluster=1 or ?sentinel=name")
        path = parts.path.strip("/")
        if path and not re.fullmatch(r"[0-9]{1,9}", path):
            raise ConfigError(f"storage URL {mask(url)!r}: the path is the number of a database, as in redis://host:6379/0")
        self.db = int(path or 0)
        if self.cluster and self.db:
            raise ConfigError(f"storage URL {mask(url)!r}: a cluster has only database 0")
        self.tls = parts.scheme == "rediss"

    @property
    def options(self) -> dict[str, Any]:
        """The options of every connection.

        No timeout for asyncio's: `RedisClient` has its own around each call. That of the library starts a task for every call,
        and before Python 3.12 it swallows a cancellation that comes just when the call was sent.
        """
        options: dict[str, Any] = {
            "username": self.username,
            "password": self.password,
            "socket_connect_timeout": CONNECT_S,
            "socket_timeout": None,
            "socket_keepalive": True,
            # The third version would bring nothing, and shapes answers in another way.
            "protocol": 2,
        }
        if not self.cluster:
            options["db"] = self.db
        if self.tls:
            options["ssl"] = True
        return options


async def _piped(client: Any, commands: Sequence[Command], wrong_type: Any) -> list[Any]:
    pipe = client.pipeline(transaction=False)
    for command in commands:
        pipe.execute_command(*command)
    answers = await pipe.execute(raise_on_error=wrong_type is None)
    return answers if wrong_type is None else [wrong_type if _is_wrong_type(a) else _raised(a) for a in answers]


def _ends_connection(exc: BaseException) -> bool:
    """An answer may still be on its way, and must never be read as another call's; or the server closes after its answer."""
    return not isinstance(exc, ResponseError) or str(exc).startswith("Protocol error")


def _is_wrong_type(answer: object) -> bool:
    return isinstance(answer, ResponseError) and "WRONGTYPE" in str(answer)


def _raised(answer: object) -> object:
    if isinstance(answer, Exception):
        raise answer
    return answer


def _hosts(netloc: str) -> str:
    return netloc.rpartition("@")[2] or "localhost"


_HOST = re.compile(r"(\[[^][]+\]|[^][:]*)(?::([0-9]{1,9}))?")


def _host(text: str, port: int, url: str) -> tuple[str, int]:
    found = _HOST.fullmatch(text)
    number = port if found is None else int(found[2] or port)
    if found is None or number > 65535:
        raise ConfigError(
            f"storage URL {mask(url)!r}: write a host as name:6379 or [address]:6379, and / ? # of a password as %2F %3F %23"
        )
    return found[1].strip("[]") or "localhost", number


def slot_of(queue: str) -> int:
    """The cluster slot of a queue's keys."""
    return key_slot(queue.encode())


class RedisClient:
    """All connections of one storage object. Safe from any thread and any event loop; survives a fork."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._lock = threading.Lock()
        self._pid = os.getpid()
        # A connection of asyncio belongs to the loop that made it. Weak, so that loops that have ended can go.
        self._loops: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = weakref.WeakKeyDictionary()
        self._nodes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncNodes] = weakref.WeakKeyDictionary()
        self._threads: Any = None
        self._spare: dict[Any, list[Any]] = {}  # connections that threads gave back, by pool

    # -- clients -----------------------------------------------------------------------------------

    def _forked(self) -> None:
        if self._pid != os.getpid():  # a child must not share its parent's sockets
            self._pid, self._threads, self._lock, self._spare = os.getpid(), None, threading.Lock(), {}
            self._loops, self._nodes = weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary()

    def of_loop(self) -> Any:
        """The asyncio client of the running loop."""
        self._forked()
        loop = asyncio.get_running_loop()
        client = self._loops.get(loop)
        if client is None:
            client = self._loops[loop] = self._make_async()
        return client

    def nodes_of_loop(self) -> AsyncNodes:
        """The nodes of the cluster, for the running loop."""
        client, loop = self.of_loop(), asyncio.get_running_loop()
        nodes = self._nodes.get(loop)
        if nodes is None:
            nodes = self._nodes[loop] = AsyncNodes(client, lambda host, port: self._async_server(host, port).connection_pool)
        return nodes

    def of_threads(self) -> redis.Redis | Nodes:
        """The blocking client, or the nodes of the cluster."""
        self._forked()
        with self._lock:
            if self._threads is None:
                made = self.make_blocking()
                cluster = self.target.cluster
                self._threads = Nodes(made, lambda host, port: self._server(host, port).connection_pool) if cluster else made
            return self._threads

    def _async_server(self, host: str, port: int) -> Any:
        return redis.asyncio.Redis(host=host, port=port, retry=AsyncRetry(NoBackoff(), _RESENDS), **self.target.options)

    def _server(self, host: str, port: int, **more: Any) -> Any:
        options: dict[str, Any] = {**self.target.options, "socket_timeout": ANSWER_S, **more}
        return redis.Redis(host=host, port=port, retry=Retry(NoBackoff(), _RESENDS), **options)

    def _make_async(self) -> Any:
        target, retry = self.target, AsyncRetry(NoBackoff(), _RESENDS)
        if target.cluster:
            nodes = [AsyncClusterNode(host, port) for host, port in target.hosts]
            return redis.asyncio.RedisCluster(startup_nodes=nodes, retry=retry, **target.options)
        if target.sentinel:
            sentinel: Any = AsyncSentinel(target.hosts, sentinel_kwargs={"socket_timeout": CONNECT_S})
            return sentinel.master_for(target.sentinel, retry=retry, **target.options)
        return self._async_server(*target.hosts[0])

    def make_blocking(self, **more: Any) -> Any:
        """A blocking client of its own."""
        target, retry = self.target, Retry(NoBackoff(), _RESENDS)
        options: dict[str, Any] = {**target.options, "socket_timeout": ANSWER_S, **more}
        if target.cluster:
            nodes = [ClusterNode(host, port) for host, port in target.hosts]
            return redis.RedisCluster(startup_nodes=nodes, retry=retry, **options)
        if target.sentinel:
            sentinel: Any = Sentinel(target.hosts, sentinel_kwargs={"socket_timeout": CONNECT_S})
            return sentinel.master_for(target.sentinel, retry=retry, **options)
        return self._server(*target.hosts[0], **more)

    async def close(self) -> None:
        self._forked()
        # Connections of other loops cannot be closed from this one: they go with their loops.
        current = asyncio.get_running_loop()
        if current in self._nodes:
            await self._nodes[current].close()
        if current in self._loops:
            await self._loops[current].aclose()
        self._loops, self._nodes = weakref.WeakKeyDictionary(), weakref.WeakKeyDictionary()
        if self._threads is not None:
            self._spare = {}  # the pool closes also what it has lent
            await asyncio.to_thread(self._threads.close)
            self._threads = None

    # -- the script --------------------------------------------------------------------------------

    async def script(self, key: str, call: bytes) -> Any:
        """Run the script on the node of `key`."""
        try:
            if not self.target.cluster:
                return await self._on_connection(self.of_loop().connection_pool, key, call)
            return await self.nodes_of_loop().call(key, lambda pool: self._on_connection(pool, key, call))
        except _FAILED as exc:
            raise self.translate(exc) from exc

    async def _on_connection(self, pool: Any, key: str, call: bytes) -> Any:
        try:
            async with asyncio.timeout(ANSWER_S):
                connection = await pool.get_connection()
        except _LOST as exc:
            raise self._away(exc) from exc

        async def ask(*command: Any) -> Any:
            await connection.send_command(*command)
            return await connection.read_response()

        try:
            async with asyncio.timeout(ANSWER_S):
                try:
                    return await ask("EVALSHA", SHA, 1, key, call)
                except NoScriptError:
                    # This puts it back into the cache of the server: a restart or a failover costs one longer call.
                    return await ask("EVAL", SCRIPT, 1, key, call)
        except _LOST as exc:
            # A late answer must not be read as that of the next call. Nobody waits for the goodbye of a server that is silent.
            await connection.disconnect(nowait=True)
            raise self._unanswered(exc) from exc
        except BaseException as exc:
            if _ends_connection(exc):
                await connection.disconnect(nowait=True)
            raise
        finally:
            await pool.release(connection)

    def script_blocking(self, key: str, *call: Any) -> Any:
        """`script` from any thread."""
        try:
            client = self.of_threads()
            if not isinstance(client, Nodes):
                return self._on_blocking_connection(client.connection_pool, key, call)
            return client.call(key, lambda pool: self._on_blocking_connection(pool, key, call))
        except _FAILED as exc:
            raise self.translate(exc) from exc

    def scripts_blocking(self, key: str, calls: Iterable[bytes]) -> Iterator[Any]:
        """Send several calls to a single node, in order. Each is made while the server works on those before it."""
        try:
            client: Any = self.of_threads()
            yield from self._several(client.connection_pool, key, calls)
        except _FAILED as exc:
            raise self.translate(exc) from exc

    def _several(self, pool: Any, key: str, calls: Iterable[bytes]) -> Iterator[Any]:
        try:
            connection = self._take(pool)
        except _LOST as exc:
            raise self._away(exc) from exc
        flying = 0
        try:
            for n, call in enumerate(calls):
                connection.send_command("EVALSHA", SHA, 1, key, call)
                flying += 1
                if n == 0:  # from here on the server knows the script
                    try:
                        reply = connection.read_response()
                    except NoScriptError:
                        connection.send_command("EVAL", SCRIPT, 1, key, call)
                        reply = connection.read_response()
                    flying -= 1
                    yield reply
                elif flying == AHEAD:
                    flying -= 1
                    yield connection.read_response()
            while flying:
                flying -= 1
                yield connection.read_response()
        except (*_LOST, NoScriptError) as exc:  # it may have forgotten the script meanwhile; the order is gone with it
            connection.disconnect()
            raise self._unanswered(exc) from exc
        except BaseException:
            connection.disconnect()
            raise
        finally:
            self._give_back(pool, connection)

    def _on_blocking_connection(self, pool: Any, key: str, call: Sequence[Any]) -> Any:
        try:
            connection = self._take(pool)
        except _LOST as exc:
            raise self._away(exc) from exc

        def ask(*command: Any) -> Any:
            connection.send_command(*command)
            return connection.read_response()

        try:
            try:
                return ask("EVALSHA", SHA, 1, key, *call)
            except NoScriptError:
                return ask("EVAL", SCRIPT, 1, key, *call)
        except _LOST as exc:
            connection.disconnect()
            raise self._unanswered(exc) from exc
        except BaseException as exc:
            if _ends_connection(exc):
                connection.disconnect()
            raise
        finally:
            self._give_back(pool, connection)

    def _take(self, pool: Any) -> Any:
        """A connection that threads used before. The pool's own bookkeeping costs as much as sending a call."""
        spare = self._spare.get(pool)
        while spare:
            try:
                connection = spare.pop()
            except IndexError:  # another thread was faster
                break
            with contextlib.suppress(*_LOST):
                # Something to read is an answer that nobody waited for, or the end of the connection.
                if not connection.can_read():
                    return connection
            connection.disconnect()
            pool.release(connection)
        return pool.get_connection()

    def _give_back(self, pool: Any, connection: Any) -> None:
        if self.target.sentinel:  # its pool has to hear of another master
            pool.release(connection)
        else:
            self._spare.setdefault(pool, []).append(connection)

    def command_blocking(self, *command: Any) -> Any:
        """From a thread. Like `command`, for what may be done twice."""
        try:
            client: Any = self.of_threads()
            return client.execute_command(*command)
        except (*_LOST, RedisClusterException) as exc:
            raise self._away(exc) from exc
        except RedisError as exc:
            raise self.translate(exc) from exc

    # -- reading -----------------------------------------------------------------------------------

    async def pipeline(self, commands: Sequence[Command], wrong_type: Any = None) -> list[Any]:
        """Several commands in one round trip (one per node on a cluster), or a few if they are very many.

        Nothing here may change what must change once. `wrong_type` stands in for the answer of a key that holds something
        else than the command is for.
        """
        found: list[Any] = []
        for start in range(0, len(commands), AT_ONCE):
            part = commands[start : start + AT_ONCE]
            found += await self._look(functools.partial(_piped, commands=part, wrong_type=wrong_type))
        return found

    async def command(self, *command: Any) -> Any:
        """One command, of which the same holds as of a `pipeline`."""
        return await self._look(lambda client: client.execute_command(*command))

    async def command_anyway(self, *command: Any) -> Any:
        """`command`, also on a server that is full: for what takes next to no room, and has its key as first argument."""
        try:
            return await self.command(*command)
        except StoreFull:
            return await self.command("EVAL", _ANYWAY, 1, command[1], *command)

    async def configuration(self, names: str) -> dict[Any, Any]:
        """Returns settings of the server, or of one of the nodes of a cluster."""
        return await self._look(lambda client: client.config_get(names))

    async def keys(self, pattern: str) -> list[str]:
        """Returns the keys of the whole store that match; none if this user may not scan."""
        # Replicas have the same keys once more.
        target = {"target_nodes": redis.RedisCluster.PRIMARIES} if self.target.cluster else {}
        try:
            async with self._looking() as client:
                return [key.decode("utf-8", "replace") async for key in client.scan_iter(pattern, count=1000, **target)]
        except StoreError as exc:
            if not isinstance(exc.__cause__, NoPermissionError):
                raise
            return []

    async def time_ms(self) -> int:
        """Returns the time of the server, or of one of the nodes of a cluster."""
        seconds, micros = await self._look(
            lambda client: client.time(**({"target_nodes": client.get_default_node()} if self.target.cluster else {}))
        )
        return int(seconds) * 1000 + int(micros) // 1000

    async def _look(self, ask: Callable[[Any], Awaitable[Any]]) -> Any:
        """Ask, and once more if the connection broke on the way: nothing here may change what must change once."""
        try:
            async with self._looking() as client:
                return await ask(client)
        except StoreUnavailable as exc:
            if not isinstance(exc.__cause__, RedisConnectionError | ConnectionError):
                raise
        async with self._looking() as client:
            return await ask(client)

    @contextlib.asynccontextmanager
    async def _looking(self) -> AsyncGenerator[Any]:
        """Lend the client of the loop, and turn its failures into those of a store."""
        nodes = self.nodes_of_loop() if self.target.cluster else None
        try:
            async with asyncio.timeout(ANSWER_S):
                yield await nodes.ready() if nodes is not None else self.of_loop()
        except UnicodeEncodeError as exc:
            raise Invalid(f"{exc.object[:40]!r} cannot be in a store: it has half a character at {exc.start}") from exc
        except (*_LOST, RedisClusterException) as exc:
            if nodes is not None:
                nodes.stale = True
            raise self._away(exc) from exc
        except RedisError as exc:
            raise self.translate(exc) from exc

    # -- failures ----------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return mask(self.target.url)

    def _away(self, exc: BaseException) -> StoreError:
        if isinstance(exc, AuthenticationError):  # trying again does not help
            return StoreError(f"{self.name} refuses this user or password: {exc}")
        return StoreUnavailable(f"cannot reach {self.name}: {exc}")

    def _unanswered(self, exc: BaseException) -> StoreError:
        # Both are answers of a server that did not take the call.
        if isinstance(exc, BusyLoadingError | AuthenticationError):
            return StoreUnavailable(f"{self.name} does not serve: {exc}")
        return OutcomeUnknown(f"{self.name} was asked and did not answer ({exc})")

    def translate(self, exc: Exception) -> StoreError:
        """An error of the server, which refused the whole call: nothing happened."""
        text = str(exc)
        # An error that a command got inside the script stands in the text of the script's own, behind a dash.
        if isinstance(exc, OutOfMemoryError) or text.startswith("OOM") or "OOM command not allowed" in text:
            return StoreFull(f"{self.name} is out of memory: raise maxmemory, and keep maxmemory-policy noeviction")
        if (
            isinstance(exc, (*_LOST, *_NOT_NOW_KINDS, RedisClusterException))
            or text.startswith(_NOT_NOW)
            or any(f"-{word}" in text for word in _NOT_NOW)
        ):
            return StoreUnavailable(f"{self.name} does not serve now: {text}")
        return StoreError(f"{self.name} failed: {text}")
