"""Audit of a log of log-probabilities: how far rollout and trainer are apart, where, and by which known cause.

A log is JSON lines, a sequence a line: ``token_ids``, ``rollout_logprobs``, ``trainer_logprobs`` of its response, and
optionally ``id``, ``version`` (of the weights that sampled it), ``trainer_version``, ``trainer_token_ids`` (what was
scored), ``entropy`` (of the trainer, nats), ``kept_mass`` (of truncated sampling), ``mask``, ``top_p``, ``top_k``,
``min_p`` and ``temperature``. Other trainers' names are accepted (:data:`precgraph.audit.log.NAMES`).

Δ = trainer − rollout throughout. Each verdict rests on an identity, not on a guess at what is usual: tokens drawn from
the rollout's distribution have mean exp Δ = 1 over the full vocabulary; renormalising over a nucleus of mass m makes
Δ = log m; a temperature T multiplies logits by 1/T, whose derivative of a log-probability is ``logp + entropy``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from precgraph.audit.log import Array, Logged, read
from precgraph.errors import CheckError
from precgraph.mismatch import ENTROPIES, ERROR_LIMIT, LARGEST, POSITIONS, bucket_names

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """A cause that was looked for and found: ``defect`` says that it makes updates wrong."""

    code: str
    defect: bool
    words: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Audit:
    """``measures`` by name, ``buckets`` (mean |Δ| and tokens by position, entropy, version lag), the worst
    ``sequences`` (name, mean |Δ|, tokens) and the ``verdicts``; ``points`` are both values of each token."""

    measures: dict[str, float]
    buckets: dict[str, dict[str, tuple[float, int]]]
    sequences: list[tuple[str, float, int]]
    verdicts: tuple[Verdict, ...]
    points: tuple[Array, Array] = field(repr=False, default_factory=lambda: (np.zeros(0), np.zeros(0)))

    @property
    def ok(self) -> bool:
        """Whether no verdict is a defect."""
        return not any(v.defect for v in self.verdicts)

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else 1

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "schema": SCHEMA,
            "ok": self.ok,
            "measures": self.measures,
            "buckets": {k: {b: {"mean": m, "tokens": n} for b, (m, n) in v.items()} for k, v in self.buckets.items()},
            "sequences": [{"id": name, "mean": mean, "tokens": n} for name, mean, n in self.sequences],
            "verdicts": [asdict(v) for v in self.verdicts],
        }


def audit(*paths: str | Path) -> Audit:
    """Read a log, of one or several files, and judge it as one; sequences of several files are named ``FILE: ID``.
    InputError names a malformed line, or a directory; CheckError if no token can be compared."""
    rows = [row for path in paths for row in _named(Path(path), alone=len(paths) == 1)]
    misaligned = _misaligned(rows)
    usable = [r for r in rows if len(r.rollout) == len(r.trainer)]
    where = np.concatenate(
        [r.mask & ~np.isnan(r.rollout) & ~np.isnan(r.trainer) for r in usable] or [np.zeros(0, bool)]
    )
    if not where.any():
        if misaligned:
            return Audit({"sequences": len(rows), "tokens": 0}, {}, [], (misaligned,))
        raise CheckError(
            "no token has both log-probabilities", path=", ".join(map(str, paths)), remedy="log both for each token"
        )
    tokens = _Tokens(usable, where)
    found = [v for v in (misaligned or _shifted(usable), *_causes(tokens, usable)) if v is not None]
    return Audit(
        _measures(tokens, rows), _buckets(tokens), _worst(tokens, usable), (*found, _numeric(tokens, found)),
        (tokens.rollout, tokens.trainer),
    )  # fmt: skip


def _named(path: Path, *, alone: bool) -> Iterator[Logged]:
    """The sequences of one file; their ids may be those of another's."""
    return (row if alone else replace(row, name=f"{path}: {row.name}") for row in read(path))


# ---------------------------------------------------------------------------------------- measures


class _Tokens:
    """The tokens that have both values, of all sequences in a row."""

    def __init__(self, rows: Sequence[Logged], where: NDArray[np.bool_]) -> None:
        def column(values: Sequence[Any]) -> Array:
            return np.concatenate([np.asarray(v, np.float64) for v in values])[where]

        def filled(name: str) -> Array:
            whole = [getattr(r, name) for r in rows]
            return column(
                [np.full(len(r.rollout), np.nan) if v is None else v for r, v in zip(rows, whole, strict=True)]
            )

        self.rollout, self.trainer = column([r.rollout for r in rows]), column([r.trainer for r in rows])
        self.entropy, self.kept = filled("entropy"), filled("kept_mass")
        self.place = column([np.arange(len(r.rollout)) for r in rows])
        self.row = column([np.full(len(r.rollout), i) for i, r in enumerate(rows)]).astype(int)
        lag = [
            math.nan if r.version is None or r.trainer_version is None else r.trainer_version - r.version for r in rows
        ]
        self.lag = np.array(lag)[self.row]
        self.truncates = np.array([r.truncates for r in rows])[self.row]
        self.delta = self.trainer - self.rollout
        self.size = np.abs(self.delta)


def _ratio(delta: Array) -> Array:
    return np.asarray(np.exp(np.minimum(delta, LARGEST)))


def _measures(t: _Tokens, rows: Sequence[Logged]) -> dict[str, float]:
    ratio = _ratio(t.delta)
    return {
        "sequences": len(rows),
        "tokens": len(t.delta),
        "missing": sum(int(np.isnan(r.rollout).sum()) + int(np.isnan(r.trainer).sum()) for r in rows),
        "different": int((t.size > 0).sum()),
        "mean": float(t.size.mean()),
        "max": float(t.size.max()),
        "bias": float(t.delta.mean()),
        "k3": float((np.expm1(np.minimum(t.delta, LARGEST)) - t.delta).mean()),
        "ratio_mean": float(ratio.mean()),
        "mult_prob_error": float(_ratio(t.size).mean()),
    }


def _buckets(t: _Tokens) -> dict[str, dict[str, tuple[float, int]]]:
    out: dict[str, dict[str, tuple[float, int]]] = {}
    for name, borders, values in (("position", POSITIONS, t.place), ("entropy", ENTROPIES, t.entropy)):
        index = np.where(np.isnan(values), -1, np.digitize(values, borders[1:]))
        out[name] = {
            label: (float(t.size[index == i].mean()), int((index == i).sum()))
            for i, label in enumerate(bucket_names(borders)) if (index == i).any()
        }  # fmt: skip
    lags = sorted(set(t.lag[~np.isnan(t.lag)].tolist()))
    out["version lag"] = {f"{lag:g}": (float(t.size[t.lag == lag].mean()), int((t.lag == lag).sum())) for lag in lags}
    return {name: table for name, table in out.items() if table}


def _worst(t: _Tokens, rows: Sequence[Logged], count: int = 10) -> list[tuple[str, float, int]]:
    """Sequences by their mean |Δ|, largest first."""
    sums, counts = np.bincount(t.row, t.size, len(rows)), np.bincount(t.row, minlength=len(rows))
    means = np.divide(sums, counts, out=np.zeros(len(rows)), where=counts > 0)
    return [(rows[i].name, float(means[i]), int(counts[i])) for i in np.argsort(-means, kind="stable")[:count]]


# ---------------------------------------------------------------------------------------- verdicts


def _misaligned(rows: Sequence[Logged]) -> Verdict | None:
    """Other tokens were scored than were sampled."""
    ids = [r.name for r in rows if r.scored_ids is not None and r.scored_ids != r.token_ids]
    lengths = [r.name for r in rows if len(r.rollout) != len(r.trainer)]
    bad = ids or lengths
    if not bad:
        return None
    what = "were scored with other token ids" if ids else "have another number of trainer values than of tokens"
    return Verdict(
        "AU101 alignment", True, f"{len(bad)} of {len(rows)} sequences {what}, the first is {bad[0]}",
        "score the sampled ids themselves, never re-tokenised text",
    )  # fmt: skip


def _shifted(rows: Sequence[Logged]) -> Verdict | None:
    """The trainer's values are right, but stand one token, or one sequence, further."""

    def distance(pairs: Sequence[tuple[Array, Array]]) -> float:
        parts = [np.abs(a[: len(b)] - b[: len(a)]) for a, b in pairs]
        values = np.concatenate(parts) if parts else np.zeros(0)
        values = values[~np.isnan(values)]
        return float(values.mean()) if len(values) else math.inf

    straight = distance([(r.rollout, r.trainer) for r in rows])
    sides = [(r.rollout, r.trainer) for r in rows]
    shifts = {
        "one token late": distance([(a[:-1], b[1:]) for a, b in sides if len(a) > 2]),
        "one token early": distance([(a[1:], b[:-1]) for a, b in sides if len(a) > 2]),
    }
    if len(rows) > 2:
        shifts["one sequence late"] = distance([(sides[i][0], sides[(i + 1) % len(rows)][1]) for i in range(len(rows))])
        shifts["one sequence early"] = distance([(sides[i][0], sides[i - 1][1]) for i in range(len(rows))])
    best = min(shifts, key=lambda k: shifts[k])
    if not shifts[best] < 0.25 * straight:
        return None
    return Verdict(
        "AU101 alignment", True,
        f"the trainer's values stand {best}: mean |Δ| is {straight:.3g}, and {shifts[best]:.3g} once moved back",
        "compare the index of each log-probability with that of its token",
    )  # fmt: skip


def _causes(t: _Tokens, rows: Sequence[Logged]) -> Iterator[Verdict | None]:
    yield _version_skew(t)
    truncated = _truncation(t)
    yield truncated
    yield None if truncated else _temperature(t, rows)


def _version_skew(t: _Tokens) -> Verdict | None:
    old, same = t.size[t.lag != 0], t.size[t.lag == 0]
    old = old[~np.isnan(t.lag[t.lag != 0])]
    if not len(old):
        return None
    share = len(old) / (len(old) + len(same))
    words = f"{share:.0%} of the tokens were sampled by other weights than scored them"
    larger = bool(len(same)) and old.mean() > 2 * same.mean() and old.mean() > 0
    if len(same):
        words += f": mean |Δ| is {old.mean():.3g} there and {same.mean():.3g} elsewhere"
    return Verdict(
        "AU102 version skew", larger or not len(same), words,
        "score with the weights that sampled, or correct by the importance ratio and say so",
    )  # fmt: skip


def _truncation(t: _Tokens) -> Verdict | None:
    """Log-probabilities renormalised over a nucleus: Δ = log of the kept mass."""
    remedy = "log full-vocabulary log-probabilities, or refuse the correction with truncated sampling"
    known = ~np.isnan(t.kept)
    if known.any() and (t.kept[known] < 1).any():
        delta = t.delta[known]
        left = np.abs(delta - np.log(np.maximum(t.kept[known], 1e-30)))
        if delta.any() and left.mean() < 0.1 * np.abs(delta).mean():
            return Verdict(
                "AU103 truncated sampling", True,
                f"Δ is the logarithm of the kept mass: the mean ratio is {_ratio(delta).mean():.4f}, the mean kept "
                f"mass {t.kept[known].mean():.4f}", remedy,
            )  # fmt: skip
    off = t.delta[t.size > 1e-6]
    if len(off) < 20 or (off < 0).mean() < 0.95:
        return None
    ratio = _ratio(t.delta)
    error = ratio.std() / math.sqrt(len(ratio))
    if ratio.mean() > 1 - 5 * error:
        return None
    declared = " (the log says that sampling was truncated)" if t.truncates.any() else ""
    return Verdict(
        "AU103 truncated sampling", True,
        f"the rollout's values are the larger ones in {(off < 0).mean():.0%} of the tokens that differ, and the mean "
        f"ratio is {ratio.mean():.4f} ± {error:.4f}, not 1: they look renormalised over a part of the "
        f"vocabulary{declared}", remedy,
    )  # fmt: skip


def _temperature(t: _Tokens, rows: Sequence[Logged]) -> Verdict | None:
    """rollout − trainer = (1/T − 1) (logp + entropy), to first order: a line through 0 says that T explains it."""
    known = ~np.isnan(t.entropy)
    if known.sum() < 20 or not t.size[known].any():
        return None
    x, y = (t.trainer + t.entropy)[known], -t.delta[known]
    # Half the way in 1/T, where the first order holds best: the mean of both sides' values.
    x = x + y / 2
    slope = float((x * y).sum() / max(float((x * x).sum()), 1e-30))
    explained = 1 - float(((y - slope * x) ** 2).sum() / (y**2).sum())
    if explained < 0.8 or abs(slope) < 0.01:
        return None
    fitted = 1 / (1 + slope) if slope > -1 else math.inf
    declared = sorted({r.temperature for r in rows if r.temperature is not None})
    said = f"; the log says {', '.join(f'{v:g}' for v in declared)}" if declared else ""
    return Verdict(
        "AU104 temperature", True,
        f"a rollout temperature of {fitted:.2f} times the trainer's explains {explained:.0%} of the difference{said}",
        "divide the trainer's logits by the sampling temperature, or log rollout values before it",
    )  # fmt: skip


def _numeric(t: _Tokens, found: Sequence[Verdict]) -> Verdict:
    """What is left when no known cause was found."""
    if not t.size.any():
        return Verdict(
            "AU100 exact", False, f"all {len(t.size)} log-probabilities are equal bit for bit", "none is needed"
        )
    error = float(_ratio(t.size).mean())
    if any(v.defect for v in found):
        return Verdict("AU109 size", False, f"mean exp|Δ| is {error:.4f}, causes are above", "remove the causes first")
    return Verdict(
        "AU110 numerics", error > ERROR_LIMIT,
        f"mean |Δ| is {t.size.mean():.3g} and mean exp|Δ| {error:.4f} (suspect above {ERROR_LIMIT}) by none of the "
        "causes looked for: the two programs compute differently",
        "precgraph check names the layers and rules in which they differ",
    )  # fmt: skip
