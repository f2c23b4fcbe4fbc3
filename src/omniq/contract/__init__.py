"""The language-neutral contract: jobs that clients of any language publish and run, over every store.

`ContractClient` (blocking) and `AsyncContractClient` speak in queues, JSON payloads, leases and milliseconds. On Redis they
share their keys with the clients of other languages; on any other store the calls are the same.
"""

from omniq.contract.blocking import ContractClient
from omniq.contract.client import AsyncContractClient
from omniq.contract.words import BatchResult, Job, JobContext, Paused, now_ms, queue_base, ulid
from omniq.errors import ContractError, LeaseLost

__all__ = [
    "AsyncContractClient",
    "BatchResult",
    "ContractClient",
    "ContractError",
    "Job",
    "JobContext",
    "LeaseLost",
    "Paused",
    "now_ms",
    "queue_base",
    "ulid",
]
