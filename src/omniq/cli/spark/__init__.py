"""The commands of `omniq spark`."""
