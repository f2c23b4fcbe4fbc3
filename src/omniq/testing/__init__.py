"""Tools for testing with omniq, and for testing a storage driver against the whole contract."""

from omniq.testing.clock import FakeClock
from omniq.testing.faulty import FaultyStorage

__all__ = ["FakeClock", "FaultyStorage"]
