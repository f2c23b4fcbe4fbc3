"""From DataFrames to tasks: format `omniq`, `enqueue` and `replay`."""
