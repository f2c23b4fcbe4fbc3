"""Benchmarks of omniq: `python -m benchmarks [names] [--quick]`."""
