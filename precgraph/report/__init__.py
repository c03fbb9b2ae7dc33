"""The result of a check as one JSON document, and everything that is made from it: text, HTML, SARIF, JUnit, GitHub.

Nothing here imports torch, but for :mod:`.layer`, which reads graphs.
"""

from precgraph.report.document import build, load, one_line, rows_of, schema, verdict

__all__ = ["build", "load", "one_line", "rows_of", "schema", "verdict"]
