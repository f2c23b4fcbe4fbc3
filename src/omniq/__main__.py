"""`python -m omniq`."""

from omniq.cli import main

main()
