"""``python -m precgraph``: the command line without its script."""

from precgraph.cli import main

main()
