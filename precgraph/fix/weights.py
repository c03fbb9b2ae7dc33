"""Level weights: the skip list of a checkpoint that says otherwise than its bytes. What is stored is what counts."""

from __future__ import annotations

from collections.abc import Sequence

from precgraph.checkpoint import Fp8Checkpoint, Selection
from precgraph.checkpoint.fp8 import CODES
from precgraph.fix.plan import Plan
from precgraph.fix.skips import edited, find_list, rewrite
from precgraph.verify.report import Report
from precgraph.verify.rules import RULES
from precgraph.verify.weights import skips

_SKIP_LIST = RULES["skip list"].code


def plan_weights(report: Report, stored: Fp8Checkpoint, selection: Selection) -> Plan:
    """Findings PG614 are mended in config.json; all others need another export."""
    plan = Plan()
    plan.by_hand += list(dict.fromkeys(f"{f.code}: {f.remedy}" for f in report.violations if f.code != _SKIP_LIST))
    wrong = [f for f in report.violations if f.code == _SKIP_LIST]
    if not wrong:
        return plan
    linear = [n.removesuffix(".weight") for n in stored if _is_linear(n, selection)]
    plain = [m for m in linear if stored.entries[f"{m}.weight"].dtype not in CODES]
    quantized = [m for m in linear if m not in set(plain)]

    def hits(entry: str) -> Sequence[str]:
        return [m for m in linear if skips(entry, m)]

    unskip = {m for m in quantized if any(skips(e, m) for e in stored.quantization.skip)}
    missing = [m for m in plain if not any(skips(e, m) for e in stored.quantization.skip)]
    entries = edited(stored.quantization.skip, hits, unskip, missing)
    path = stored.folder / "config.json"
    place = find_list(stored.config)
    right = {m for m in linear if any(skips(e, m) for e in entries)} == set(plain)
    if isinstance(place, str) or not right:
        why = place if isinstance(place, str) else "no list of names fits loaders that match the ends of paths"
        plan.by_hand.append(f"{path}: {why}; name the plain layers in full in modules_to_not_convert")
        return plan
    change = rewrite(path, place, entries, f"{path}: {place[-1]} names the layers that are stored plain")
    if isinstance(change, str):
        plan.by_hand.append(change)
    else:
        plan.changes.append(change)
    return plan


def _is_linear(name: str, selection: Selection) -> bool:
    module = name.removesuffix(".weight")
    return name != module and (name in selection.quantized or module in selection.kept)
