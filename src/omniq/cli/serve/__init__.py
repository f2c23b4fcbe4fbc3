"""The line protocol from a shell: `serve`, `send`."""
