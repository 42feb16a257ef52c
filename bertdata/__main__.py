"""`python -m bertdata`."""

from bertdata.cli import main

main()
