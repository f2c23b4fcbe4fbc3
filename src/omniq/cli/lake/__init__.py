"""The commands of `omniq lake`."""
