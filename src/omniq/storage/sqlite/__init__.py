"""A queue in a SQLite file. `driver` is the storage, `ledger` the rows, `schema` the tables."""

from omniq.storage.sqlite.driver import SQLiteStorage as SQLiteStorage
