"""Typed errors: every failure that precgraph can name, as one class each.

A message is one clear line that says what is wrong, where (the module path, when there is one) and what
to do about it. The command line prints the message alone and exits with 2.
"""


class PrecGraphError(Exception):
    """Base of every error that precgraph raises on purpose.

    ``message`` says what is wrong, ``path`` names the module or node it happened at, and ``remedy`` says
    what to do; ``str(error)`` joins those that were given into one line, ``path: message; remedy``.
    """

    def __init__(self, message: str, *, path: str | None = None, remedy: str | None = None) -> None:
        self.message = message
        self.path = path
        self.remedy = remedy
        super().__init__(message)

    def __str__(self) -> str:
        line = f"{self.path}: {self.message}" if self.path else self.message
        return f"{line}; {self.remedy}" if self.remedy else line


class TraceError(PrecGraphError):
    """The model could not be turned into a graph."""


class RecipeError(PrecGraphError, ValueError):
    """A recipe or a format is malformed: an unknown key, a value out of range, a rule that matches nothing."""


class GraphError(PrecGraphError):
    """A graph breaks a well-formedness rule, or a pass met a shape of graph that it does not handle."""


class LoweringError(PrecGraphError):
    """No registered kernel can serve a node on the chosen backend."""


class UnsupportedModelError(PrecGraphError):
    """The model uses something that cannot be served exactly (and is therefore refused before it runs)."""


class InputError(PrecGraphError, ValueError):
    """A call's arguments are wrong: shapes, dtypes, masks, positions, paths."""


class NonFiniteError(PrecGraphError, ArithmeticError):
    """An infinity or NaN reached a quantiser in checked mode."""


class StaleWeightsError(PrecGraphError):
    """The weight store is older than the master weights; ``actor.sync()`` refreshes it."""


class NumericsStateError(PrecGraphError):
    """Ambient state (autocast, matmul precision, denormal flags) would change the bits of the result."""


class CheckError(PrecGraphError):
    """A check could not be carried out; this says nothing about consistency."""


class SyncError(PrecGraphError):
    """An update of a rollout's weights was refused, or broke off; without one, what was served before still is."""


class DigestError(PrecGraphError):
    """A rollout runs another program than the trainer: other semantics, numerics, kernels or versions."""


class RoundingWarning(UserWarning):
    """A checkpoint's config names another dtype than bfloat16, and what is loaded is its weights rounded to that."""
