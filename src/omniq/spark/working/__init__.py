"""Tasks that run on executors, and results that come back as columns."""
