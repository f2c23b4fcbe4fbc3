"""The TCP server of the line protocol: any store, for any language with sockets."""

from omniq.server.options import ServeOptions
from omniq.server.server import Server

__all__ = ["ServeOptions", "Server"]
