"""A queue on Redis. `driver` is the storage, `lua/` the state machine inside the server, `wire` the words between them."""

from omniq.storage.redis.driver import RedisStorage as RedisStorage
