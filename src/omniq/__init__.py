"""omniq: a job queue that is embedded in your script, durable by default."""

from omniq._version import __version__

__all__ = ["__version__"]
