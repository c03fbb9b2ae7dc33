"""Families of codes, and which of them each level can find."""

FAMILIES = {
    "PG0": "settings of the check", "PG1": "formats", "PG2": "dtypes and numeric rules", "PG3": "constants",
    "PG4": "structure", "PG5": "kernels and measured values", "PG6": "stored bytes", "PG7": "machines",
}  # fmt: skip
_PROGRAM = ("PG0", "PG1", "PG2", "PG3", "PG4", "PG5")
LEVELS: dict[str, tuple[str, ...]] = {
    "graph": _PROGRAM, "numerics": _PROGRAM, "weights": ("PG0", "PG1", "PG3", "PG6"), "env": ("PG0", "PG7"),
}  # fmt: skip


def families(level: str) -> tuple[str, ...]:
    """The families that a level compares; all of them for a level that is not known."""
    return LEVELS.get(level, tuple(FAMILIES))
