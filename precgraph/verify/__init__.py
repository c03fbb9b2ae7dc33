"""Checks that two programs are one policy. Nothing here shares code with the passes that build the programs."""

from precgraph.verify.inclusion import check_inclusion
from precgraph.verify.report import Finding, Report, Row

__all__ = ["Finding", "Report", "Row", "check_inclusion"]
