"""Clients of the line protocol: `Client`, blocking, and `AsyncClient`, with the same methods.

They need a server (`omniq serve`), not a store. A task that was fetched belongs to the connection: when that is lost, the
server has already counted a failure and will hand the task out again.
"""

from omniq.client.aio import AsyncClient
from omniq.client.blocking import Client
from omniq.client.requests import Transaction
from omniq.client.wire import FetchedTask, QueueInfo, TaskOutcome

AsyncTransaction = Transaction  # until the block ends nothing is sent, and so nothing is awaited

__all__ = ["AsyncClient", "AsyncTransaction", "Client", "FetchedTask", "QueueInfo", "TaskOutcome", "Transaction"]
