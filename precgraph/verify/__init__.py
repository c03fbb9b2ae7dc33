"""Checks that two programs are one policy. Nothing here shares code with the passes that build the programs.

Names are imported when they are first used: the table of rules is read where torch is not wanted.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from precgraph.verify.inclusion import check_inclusion
    from precgraph.verify.report import Finding, Report, Row

__all__ = ["Finding", "Report", "Row", "check_inclusion"]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = "inclusion" if name == "check_inclusion" else "report"
        return getattr(import_module(f"precgraph.verify.{home}"), name)
