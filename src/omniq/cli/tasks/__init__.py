"""Commands on single tasks: `enqueue`, `result`, `tasks`, `dlq`."""
