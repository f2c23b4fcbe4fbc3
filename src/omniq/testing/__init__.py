"""Tools for testing with omniq, and for testing a storage driver against the whole contract."""

from omniq.testing.clock import FakeClock
from omniq.testing.faulty import FaultyStorage
from omniq.testing.running import assert_enqueued, run_until_idle

__all__ = ["FakeClock", "FaultyStorage", "assert_enqueued", "run_until_idle"]
