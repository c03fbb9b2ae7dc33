"""Audits of logs whose right verdict follows from how they are made: logits, sampled tokens, one cause at a time."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from precgraph import CheckError, InputError
from precgraph.audit import Audit, audit, plot
from precgraph.cli import app

ROWS, LENGTH, VOCABULARY = 24, 80, 50
Row = dict[str, Any]


def log_softmax(z: Any) -> Any:
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def log(
    *, temperature: float = 1.0, top_p: float = 1.0, noise: float = 0.0, seed: int = 0, entropy: bool = True
) -> list[Row]:
    """Sequences sampled from the rollout's distribution and scored at temperature 1 over the whole vocabulary."""
    random = np.random.default_rng(seed)
    rows = []
    for i in range(ROWS):
        z = random.normal(size=(LENGTH, VOCABULARY)) * random.uniform(0.5, 4, size=(LENGTH, 1))
        trainer = log_softmax(z + noise * random.normal(size=z.shape))
        rollout = log_softmax(z / temperature)
        order = np.argsort(-rollout, axis=-1)
        mass = np.take_along_axis(np.exp(rollout), order, -1)
        kept_sorted = mass.cumsum(-1) - mass < top_p
        kept = np.zeros_like(kept_sorted)
        np.put_along_axis(kept, order, kept_sorted, -1)
        total = np.where(kept, np.exp(rollout), 0).sum(-1)
        p = np.where(kept, np.exp(rollout), 0) / total[:, None]
        ids = np.array([random.choice(VOCABULARY, p=q) for q in p])
        pick = np.arange(LENGTH), ids
        row: Row = {
            "id": f"s{i}", "token_ids": ids.tolist(), "rollout_logprobs": (rollout[pick] - np.log(total)).tolist(),
            "trainer_logprobs": trainer[pick].tolist(), "version": 3, "trainer_version": 3, "temperature": temperature,
        }  # fmt: skip
        if top_p < 1:
            row |= {"kept_mass": total.tolist(), "top_p": top_p}
        if entropy:
            row["entropy"] = (-(np.exp(trainer) * trainer).sum(-1)).tolist()
        rows.append(row)
    return rows


def judged(folder: Path, rows: list[Row]) -> Audit:
    path = folder / "log.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return audit(path)


def codes(found: Audit) -> set[str]:
    """Codes of the defects."""
    return {v.code.split()[0] for v in found.verdicts if v.defect}


def test_equal_values_are_exact(tmp_path: Path) -> None:
    rows = log()
    for row in rows:
        row["trainer_logprobs"] = row["rollout_logprobs"]
    found = judged(tmp_path, rows)
    assert found.ok and [v.code for v in found.verdicts] == ["AU100 exact"]
    assert found.measures["tokens"] == ROWS * LENGTH and found.measures["max"] == 0


def test_measures_are_their_formulas(tmp_path: Path) -> None:
    """Two tokens of known difference, and one masked one that would spoil every mean."""
    found = judged(tmp_path, [{
        "token_ids": [1, 2, 3], "rollout_logprobs": [-1.0, -2.1, -9.0], "trainer_logprobs": [-1.0, -2.0, -3.0],
        "mask": [1, 1, 0],
    }])  # fmt: skip
    m = found.measures
    assert m["tokens"] == 2 and m["different"] == 1
    assert m["mean"] == pytest.approx(0.05) and m["max"] == pytest.approx(0.1)
    assert m["mult_prob_error"] == pytest.approx((1 + np.exp(0.1)) / 2)  # 1.0526, above the limit
    assert m["k3"] == pytest.approx((np.exp(0.1) - 1 - 0.1) / 2)
    assert codes(found) == {"AU110"}


def test_small_noise_is_no_defect_and_large_noise_is(tmp_path: Path) -> None:
    small, large = judged(tmp_path, log(noise=0.01)), judged(tmp_path, log(noise=0.3))
    assert small.ok and small.verdicts[-1].code == "AU110 numerics"
    assert codes(large) == {"AU110"}


def test_buckets_follow_position_and_entropy(tmp_path: Path) -> None:
    rows = log()
    for row in rows:
        place = np.arange(LENGTH)
        row["trainer_logprobs"] = (np.array(row["rollout_logprobs"]) - 0.001 * (place >= 64)).tolist()
    table = judged(tmp_path, rows).buckets["position"]
    counts = {"0-1": 1, "1-2": 1, "2-4": 2, "4-8": 4, "8-16": 8, "16-64": 48, "64-256": 16}
    assert {k: n for k, (_, n) in table.items()} == {k: n * ROWS for k, n in counts.items()}
    assert table["8-16"][0] == table["16-64"][0] == 0 and table["64-256"][0] == pytest.approx(0.001)


@pytest.mark.parametrize("entropy", [True, False])
@pytest.mark.parametrize("mass", [True, False])
def test_truncated_sampling(mass: bool, entropy: bool, tmp_path: Path) -> None:
    rows = log(top_p=0.9, entropy=entropy)
    if not mass:
        for row in rows:
            del row["kept_mass"]
    found = judged(tmp_path, rows)
    assert codes(found) == {"AU103"}
    assert found.measures["ratio_mean"] == pytest.approx(0.93, abs=0.03)


def test_truncated_sampling_that_is_accounted_for_is_none(tmp_path: Path) -> None:
    rows = log(top_p=0.9)
    for row in rows:
        row["trainer_logprobs"] = (np.array(row["trainer_logprobs"]) - np.log(row["kept_mass"])).tolist()
    assert judged(tmp_path, rows).ok


@pytest.mark.parametrize("temperature", [0.7, 0.9, 1.2, 1.5])
def test_a_temperature_on_one_side_is_fitted(temperature: float, tmp_path: Path) -> None:
    found = judged(tmp_path, log(temperature=temperature))
    (verdict,) = (v for v in found.verdicts if v.defect)
    assert verdict.code == "AU104 temperature"
    fitted = re.search(r"temperature of ([\d.]+) times", verdict.words)
    assert fitted and float(fitted[1]) == pytest.approx(temperature, rel=0.1)
    assert f"the log says {temperature:g}" in verdict.words


def _late(rows: list[Row]) -> None:
    for row in rows:
        row["trainer_logprobs"] = [row["trainer_logprobs"][0], *row["trainer_logprobs"][:-1]]


def _early(rows: list[Row]) -> None:
    for row in rows:
        row["trainer_logprobs"] = [*row["trainer_logprobs"][1:], row["trainer_logprobs"][-1]]


def _next_row(rows: list[Row]) -> None:
    values = [row["trainer_logprobs"] for row in rows]
    for row, value in zip(rows, [values[-1], *values[:-1]], strict=True):
        row["trainer_logprobs"] = value


def _other_ids(rows: list[Row]) -> None:
    rows[5]["trainer_token_ids"] = [*rows[5]["token_ids"][:-2], 1000, 1001]


def _short(rows: list[Row]) -> None:
    rows[5]["trainer_logprobs"].pop()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_late, "one token late"), (_early, "one token early"), (_next_row, "one sequence late"),
        (_other_ids, "1 of 24 sequences were scored with other token ids, the first is s5"),
        (_short, "1 of 24 sequences have another number of trainer values"),
    ],
)  # fmt: skip
def test_alignment_errors(damage: Callable[[list[Row]], None], words: str, tmp_path: Path) -> None:
    rows = log(noise=0.01)
    damage(rows)
    found = judged(tmp_path, rows)
    assert "AU101" in codes(found)
    assert words in next(v.words for v in found.verdicts if v.code == "AU101 alignment")


def test_version_skew(tmp_path: Path) -> None:
    """A third of the sequences come from older weights and differ ten times as much."""
    fresh, old = log(noise=0.01), log(noise=0.1, seed=1)
    for row in old:
        row["version"] = 2
    found = judged(tmp_path, fresh[:16] + old[16:])
    assert codes(found) == {"AU102"}
    assert "33% of the tokens" in found.verdicts[0].words
    assert set(found.buckets["version lag"]) == {"0", "1"}
    worst = {name for name, *_ in found.sequences[:8]}
    assert worst == {row["id"] for row in old[16:]}


def test_missing_values_are_counted_and_nothing_else(tmp_path: Path) -> None:
    rows = log(noise=0.01)
    rows[0]["rollout_logprobs"][3] = None
    found = judged(tmp_path, rows)
    assert found.ok and found.measures["missing"] == 1 and found.measures["tokens"] == ROWS * LENGTH - 1


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "log.jsonl:1: is not JSON"),
        ("[1]", "is not an object"),
        ('{"token_ids": [1], "rollout_logprobs": [-1]}', "lacks token_ids"),
        ('{"token_ids": [1, 2], "rollout_logprobs": [-1], "trainer_logprobs": [-1]}', "has 2 token_ids and 1"),
        ('{"token_ids": [1], "rollout_logprobs": ["x"], "trainer_logprobs": [-1]}', "not a list of numbers"),
        ('{"token_ids": [1], "rollout_logprobs": ["1"], "trainer_logprobs": [-1]}', "not a list of numbers"),
        ('{"token_ids": [1], "rollout_logprobs": "1", "trainer_logprobs": [-1]}', "not a list of numbers"),
        ('{"token_ids": [1], "rollout_logprobs": [-1e999], "trainer_logprobs": [-1]}', "not a list of numbers"),
        ('{"token_ids": [1], "rollout_logprobs": [-1e308], "trainer_logprobs": [-1]}', "not a list of numbers"),
        ('{"token_ids": [1], "rollout_logprobs": [0.5], "trainer_logprobs": [-1]}', "positive log-probability"),
        ('{"token_ids": [1], "rollout_logprobs": [-1], "trainer_logprobs": [-1], "entropy": [1, 2]}', "has 2 entropy"),
    ],
)
def test_malformed_lines(line: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(line + "\n")
    with pytest.raises(InputError, match=re.escape(words)):
        audit(tmp_path / "log.jsonl")


@pytest.mark.parametrize(
    ("key", "bad", "good"),
    [
        ("temperature", ["0", "0.0", "-1", '"0.7"', "true", "1e999", "[1]", "1" + "0" * 400], ["1", "0.7", "null"]),
        ("top_p", ["0", "-0.1", "1.01", "2", '"x"', "NaN", "{}"], ["1", "0.9", "null"]),
        ("top_k", ["-2", "1.5", '"20"'], ["-1", "0", "20"]),
        ("min_p", ["-0.1", "1.5", "false"], ["0", "0.05", "1"]),
        ("version", ['"v3"', "1e999"], ["3", "2.5", "null"]),
        ("kept_mass", ["[-0.1]", "[1.1]"], ["[1.0000001]", "[0.5]", "[null]", "null"]),
        ("entropy", ["[-0.1]", "[-1e308]"], ["[-1e-9]", "[3.5]", "[null]"]),
    ],
)
def test_numbers_out_of_range_are_refused_with_their_line(
    key: str, bad: list[str], good: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "log.jsonl"
    line = '{"token_ids": [1], "rollout_logprobs": [-1], "trainer_logprobs": [-1]%s}\n'
    for value in bad:
        path.write_text(line % "" + line % f', "{key}": {value}')
        result = CliRunner().invoke(app, ["audit", str(path)])
        assert result.exit_code == 2, value
        assert "log.jsonl:2: " in result.stderr and "internal" not in result.stderr
    for value in good:
        path.write_text(line % f', "{key}": {value}')
        assert CliRunner().invoke(app, ["audit", str(path)]).exit_code == 0, value


def test_the_least_value_of_fp32_is_judged(tmp_path: Path) -> None:
    """Trainers put it where a token is masked; what is measured of it is finite, or it could not be written."""
    path, least = tmp_path / "log.jsonl", "[-3.4028234663852886e+38, -1, -1]"
    path.write_text(f'{{"token_ids": [1, 2, 3], "rollout_logprobs": {least}, "trainer_logprobs": [-1, -1, -1]}}\n' * 9)
    result = CliRunner().invoke(app, ["audit", str(path), "--json"])
    assert result.exit_code == 1 and json.loads(result.stdout)["measures"]["max"] == 3.4028234663852886e38


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85"])
def test_line_ends_of_unicode_are_text(tmp_path: Path, end: str) -> None:
    line = {"id": f"a{end}b", "token_ids": [1], "rollout_logprobs": [-1], "trainer_logprobs": [-1]}
    (tmp_path / "log.jsonl").write_text(json.dumps(line, ensure_ascii=False), encoding="utf-8")
    assert audit(tmp_path / "log.jsonl").sequences[0][0] == f"a{end}b"


def test_an_empty_log_is_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text("")
    with pytest.raises(CheckError, match="no token has both"):
        audit(tmp_path / "log.jsonl")


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in log(temperature=0.7)))
    result = CliRunner().invoke(app, ["audit", str(path), "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["verdicts"][0]["code"] == "AU104 temperature"
    shown = CliRunner().invoke(app, ["audit", str(path)])
    assert shown.exit_code == 1 and "AU104" in shown.stdout and "Mismatch by position" in shown.stdout
    assert CliRunner().invoke(app, ["audit", str(tmp_path / "none.jsonl")]).exit_code == 2


def test_several_files_are_one_log(tmp_path: Path) -> None:
    """One that scored its own tokens, and one that scored others; the third sequence of the latter is not the first
    file's of that id."""
    rows, more = log(seed=0), log(seed=1)
    more[2]["trainer_token_ids"] = [0] * LENGTH
    files = [tmp_path / "000000.jsonl", tmp_path / "000001.jsonl"]
    for file, part in zip(files, (rows, more), strict=True):
        file.write_text("".join(json.dumps(r) + "\n" for r in part))
    found, one = audit(*files), judged(tmp_path, [*rows, *more])
    assert (found.measures, found.buckets) == (one.measures, one.buckets)
    assert found.measures["sequences"] == 2 * ROWS
    assert found.verdicts[0].words.endswith(f"the first is {files[1]}: s2")
    result = CliRunner().invoke(app, ["audit", *map(str, files), "--json"])
    assert (result.exit_code, json.loads(result.stdout)) == (1, json.loads(json.dumps(found.to_json())))


def test_a_directory_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is a directory; name the files in it: .*/\*\.jsonl"):
        audit(tmp_path)


def test_the_plot(tmp_path: Path) -> None:
    found = judged(tmp_path, log(noise=0.01))
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(InputError, match="needs matplotlib"):
            plot(found, tmp_path / "x.png")
    else:
        with pytest.raises(InputError, match="x.abc: cannot be drawn"):
            plot(found, tmp_path / "x.abc")
        plot(found, tmp_path / "x.png")
        assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("equal", [True, False])
def test_the_plot_draws_means_from_zero_and_names_what_differs(
    equal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn: list[Any] = []
    monkeypatch.setattr(figure, "savefig", lambda self, path: drawn.append(self))
    rows = log(noise=0.01)
    found = judged(tmp_path, [row | {"trainer_logprobs": row["rollout_logprobs"]} for row in rows] if equal else rows)
    plot(found, tmp_path / "x.png")
    position, entropy, worst, _ = drawn[0].axes
    assert [axes.get_ylim()[0] for axes in (position, entropy, worst)] == [0, 0, 0]
    assert worst.get_title() == ("no sequence differs" if equal else "worst sequences")
    names = [] if equal else [name for name, *_ in found.sequences]
    assert [label.get_text() for label in worst.get_xticklabels()] == names
