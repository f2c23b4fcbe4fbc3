"""The state machine of the driver contract, for every driver that runs in Python.

A driver gives `Machine` a ledger (`omniq.storage.ledger`), which loads and saves rows inside one atomic section.
"""

from omniq.storage.machine.machine import Machine as Machine
