"""All precision arms side by side on one card, in parts that end in time, and the page of what they did.

``grpo_arms.py run --model PATH --runs DIR --seconds 560`` converts the model once, lets one process make two steps of
the arm ``exact`` while others compile the kernels, stops with a readable message if that fails, and then runs every arm
and seed as a process of its own until they are done or the time is up; the same command goes on where it stopped.
``grpo_arms.py kernels --model PATH`` compiles the kernels ahead of that, for any weights of the model's shapes.
``grpo_arms.py report --runs DIR -o PREFIX`` writes curves (PNG, HTML) and a table (Markdown) from what the runs left.
Processes share compiled kernels through ``DG_JIT_CACHE_DIR`` and ``TRITON_CACHE_DIR``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.cli import UNFINISHED
from trainer.errors import TrainerError
from trainer.validation import ARMS

CONFIG = Path(__file__).parent / "configs" / "smollm2.toml"
SAVING = 30.0  # seconds that the last checkpoints of all runs may take
ORIGIN = "converted-from.txt"  # beside the converted model: what it was made of
STEPS = "run.steps="  # the only setting that a further part may change
SHARE = 0.9  # of the card's memory that all runs together may take
SCRIPT = "python examples/grpo_arms.py"
COMMANDS = (  # that come before the report
    f"{SCRIPT} kernels --model MODEL --runs RUNS",
    f"{SCRIPT} run --model MODEL --runs RUNS  # again, until each run has all its steps",
)
TRAIN = [sys.executable, "-m", "trainer.cli"]
# Counts that the configuration meets (precgraph.runtime.sizes): tokens of a micro-batch, from one cell's smallest on,
# and rows of a decoding step or of the last part of a micro-batch's logits.
TOKENS = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


# --------------------------------------------------------------------------------------------- run


def run(options: argparse.Namespace) -> int:
    """Returns the exit code: 0 if every run stands, done or to be continued; 1 if one failed; 2 if none could start."""
    end = time.monotonic() + options.seconds
    runs, logs = Path(options.runs), Path(options.runs) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    model = runs / "model"
    if not model.exists():
        say("converting the model")
        convert(options.model, model)
    origin = (model / ORIGIN).read_text() if (model / ORIGIN).exists() else options.model
    if origin != options.model:
        say(f"{runs} holds runs of {origin}, not of {options.model}: name another folder with --runs")
        return 2
    for directory in (runs / f"{arm}-{seed}" for arm in options.arms for seed in options.seeds):
        if others := changed(directory, options.settings):
            say(f"{directory} was started without {', '.join(others)}: leave it out, or name another folder by --runs")
            return 2
    count = len(options.arms) * len(options.seeds)
    common = [f"model.path={model}", f"model.memory={SHARE / count:.3f}", *options.settings]
    if not options.no_smoke and not smoke(common, runs, logs, options.warm, end):
        return 1
    seconds = end - SAVING - time.monotonic()
    if seconds <= 0:
        say(f"no time is left for a step: --seconds {options.seconds:g} is too few")
        return 2
    say(f"starting {count} runs for {seconds:.0f} s")
    threads = max(1, (os.cpu_count() or 1) // count)
    started = {
        f"{arm}-{seed}": start(
            command(runs / f"{arm}-{seed}", arm, seed, common, seconds), logs / f"{arm}-{seed}.log", threads
        )
        for seed in options.seeds for arm in options.arms
    }  # fmt: skip
    with watched(runs / "gpu.csv"):
        codes = {name: finish(process, end) for name, process in started.items()}
    failed = {name: code for name, code in codes.items() if code not in (0, UNFINISHED)}
    for name in codes:
        say(f"{name}: {last_line(runs / name)}" + (f"; exit code {failed[name]}, see below" if name in failed else ""))
        if name in failed:
            print(tail(logs / f"{name}.log", 30), flush=True)
    return int(bool(failed))


def command(directory: Path, arm: str, seed: int, settings: Sequence[str], seconds: float) -> list[str]:
    """The trainer's own command: a new run, or the rest of one that has a checkpoint."""
    limit = ["--max-seconds", f"{seconds:.0f}"]
    if goes_on(directory):
        return [*TRAIN, "resume", str(directory), *limit, *_sets(s for s in settings if s.startswith(STEPS))]
    own = [
        f"run.name={directory.name}",
        f"run.dir={directory}",
        f"run.seed={seed}",
        f"precision.arm={arm}",
        "metrics.tensorboard=false",
    ]
    asserts = ["--assert", "mismatch/max == 0"] if arm == "exact" else []
    return [*TRAIN, "run", str(CONFIG), *limit, *asserts, *_sets([*own, *settings])]


def goes_on(directory: Path) -> bool:
    """Whether a run directory holds a run to resume."""
    return (directory / "config.toml").exists() and any((directory / "checkpoints").glob("step-*"))


def changed(directory: Path, settings: Sequence[str]) -> list[str]:
    """Settings that a run to resume was not started with; it may become longer, and nothing else."""
    from trainer.config import load

    if not goes_on(directory):
        return []
    path = directory / "config.toml"
    return [s for s in settings if not s.startswith(STEPS) and load(path, [s]) != load(path)]


def smoke(settings: Sequence[str], runs: Path, logs: Path, helpers: int, end: float) -> bool:
    """Two small steps of the arm exact, without a mismatch; meanwhile ``helpers`` processes compile the kernels. What
    those do not get done is compiled when it is met."""
    say(f"two steps of the arm exact; {helpers} processes compile kernels")
    begin = time.monotonic()
    shutil.rmtree(runs / "smoke", ignore_errors=True)
    small = ["run.steps=2", "run.eval_every=0", "rollout.groups=4", "rollout.samples=4", "eval.items=8"]
    probe = start(command(runs / "smoke", "exact", 0, [*settings, *small], 600), logs / "smoke.log")
    warmers = warmed(settings, logs, helpers)
    failed = finish(probe, end) != 0
    if failed:
        for process in warmers:
            process.kill()
    codes = [finish(process, end) for process in warmers]
    if failed:
        print(f"the smoke run failed:\n{tail(logs / 'smoke.log', 60)}", flush=True)
        return False
    tell(codes, logs)
    shutil.rmtree(runs / "smoke" / "checkpoints", ignore_errors=True)
    say(f"smoke: {last_line(runs / 'smoke')}; {time.monotonic() - begin:.0f} s")
    return True


def kernels(options: argparse.Namespace) -> int:
    """Compile the kernels of the model's shapes; returns the exit code."""
    begin, logs = time.monotonic(), Path(options.runs) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    started = warmed([f"model.path={options.model}", *options.settings], logs, options.warm)
    codes = [finish(process, begin + options.seconds) for process in started]
    tell(codes, logs)
    say(f"{options.warm} processes compiled kernels for {time.monotonic() - begin:.0f} s")
    return int(any(codes))


def warmed(settings: Sequence[str], logs: Path, helpers: int) -> list[subprocess.Popen[bytes]]:
    """``helpers`` processes that compile kernels, each for a part of the sizes."""
    own = [sys.executable, __file__, "warm", *_sets(settings)]
    return [start([*own, "--part", str(i), str(helpers)], logs / f"warm-{i}.log") for i in range(helpers)]


def tell(codes: Sequence[int], logs: Path) -> None:
    """Print the end of the log of each process that failed to compile kernels."""
    for i, code in enumerate(codes):
        if code:
            print(f"warm-{i} failed with exit code {code}:\n{tail(logs / f'warm-{i}.log', 30)}", flush=True)


def warm(settings: Sequence[str], part: int, parts: int) -> None:
    """Call the programs at some of the sizes, so that their kernels are compiled: the last part those of the arm
    unified, whose rollout has kernels of its own for any size, all others those of exact."""
    import torch

    import precgraph
    from precgraph.runtime.contexts import PackedContext
    from trainer.config import load
    from trainer.models import device_of, load_policy
    from trainer.precision import build_pair

    unified = parts > 1 and part == parts - 1
    config = load(CONFIG, [*settings, f"precision.arm={'unified' if unified else 'exact'}"])
    pair = build_pair(load_policy(config.model).to(device_of(config.model.device)), config)
    device, rollout = next(pair.actor.parameters()).device, pair.program.precgraph
    share = slice(0, None) if unified else slice(part, None, max(1, parts - 1))

    def packed(count: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Ids and positions of ``count`` tokens in sequences of 64, and their bounds."""
        at = torch.arange(count, device=device)[None]
        return at % pair.actor.config.vocab_size, at % 64, [*range(0, count, 64), count]

    with torch.no_grad():
        for count in [*TOKENS, *ROWS][::-1][share]:
            ids, positions, bounds = packed(count)
            hidden = rollout.hidden(ids, positions, PackedContext(bounds))
            rollout.logits(hidden[:, : min(count, ROWS[-1])])
    if unified:
        return
    for count, most in [*((TOKENS[0], n) for n in ROWS), *((n, ROWS[-1]) for n in TOKENS)][::-1][share]:
        ids, _, bounds = packed(count)
        rows = torch.tensor([i for i in range(count) if (i + 1) % 64], device=device).repeat(5)[:most]
        scored = precgraph.token_logprobs(
            pair.actor, ids, cu_seq_lens=torch.tensor(bounds, device=device), entropy=True, rows=rows
        )
        scored[0].sum().backward()
        pair.actor.zero_grad()


def convert(source: str, target: Path) -> None:
    """Save a model and its tokenizer as a Hugging Face directory, so that many processes load it quickly; the directory
    appears whole, with a note of its source."""
    from trainer.config import ModelTable
    from trainer.models import load_policy, load_tokenizer

    part = target.with_name(f".{target.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    table = ModelTable(path=source)
    load_policy(table).save_pretrained(part)
    load_tokenizer(table).save_pretrained(part)
    (part / ORIGIN).write_text(source)
    part.rename(target)


def report(options: argparse.Namespace) -> int:
    """Write the page of what the runs left; returns the exit code."""
    from trainer.report import Said, write_report

    for fact in options.facts:
        if "=" not in fact:
            say(f"--fact {fact!r} is not of the form NAME=VALUE")
            return 2
    facts = {name: value for name, _, value in (fact.partition("=") for fact in options.facts)}
    own = f"{SCRIPT} report --runs RUNS -o {options.output}  # and --title, --fact, --note"
    said = Said(options.title, facts, options.notes, [*COMMANDS, own])
    for path in write_report(Path(options.runs), options.output, said):
        print(path)
    return 0


# ----------------------------------------------------------------------------------------- helpers


def start(arguments: Sequence[str], log: Path, threads: int = 1) -> subprocess.Popen[bytes]:
    """One process with so many CPU threads, all it prints in ``log``."""
    environment = {
        **os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
        "PYTORCH_CUDA_ALLOC_CONF": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
        "PYTHONPATH": os.pathsep.join([str(CONFIG.parents[2]), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    return subprocess.Popen(
        arguments, stdin=subprocess.DEVNULL, stdout=log.open("ab"), stderr=subprocess.STDOUT, env=environment
    )


def finish(process: subprocess.Popen[bytes], end: float) -> int:
    """The exit code of a process; killed at ``end``, which leaves its records and its last whole checkpoint."""
    try:
        return process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


@contextmanager
def watched(path: Path) -> Iterator[None]:
    """Meanwhile the card's busy share and memory, once a second, where there is a driver to ask."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield
        return
    card = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]  # a host's other cards do other work
    query = [tool, "-i", card, "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits", "-l", "1"]
    with path.open("ab") as out:
        process = subprocess.Popen(query, stdout=out, stderr=subprocess.DEVNULL)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def last_line(directory: Path) -> str:
    """How far a run came, in words."""
    from trainer.metrics import read_records

    try:
        records = read_records(directory)
    except TrainerError:
        records = []
    if not records:
        return "no step"
    first, last = records[0], records[-1]
    seconds = statistics.median(r["time/step"] for r in records)
    return (
        f"{len(records)} steps, pass {first['reward/pass_rate']:.3f} to {last['reward/pass_rate']:.3f}, max |Δ| "
        f"{max(r['mismatch/max'] for r in records):.2e}, {seconds:.2f} s a step, {last['memory/peak_gb']:.1f} GB"
    )


def tail(path: Path, lines: int) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else "(no log)"


def say(text: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {text}", flush=True)


def _sets(settings: Any) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run or continue all arms and seeds")
    running.add_argument("--model", required=True, help="a directory, a .gguf or a hub id")
    running.add_argument("--runs", default="runs/arms", help="where the run directories go")
    running.add_argument("--seconds", type=float, default=560.0, help="the whole command ends within so many")
    running.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    running.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    running.add_argument("--warm", type=int, default=8, help="processes that compile kernels during the smoke run")
    running.add_argument("--no-smoke", action="store_true", help="for a second part")
    compiling = commands.add_parser("kernels", help="compile the kernels ahead")
    compiling.add_argument("--model", required=True, help="a model of the same shapes; its weights do not matter")
    compiling.add_argument("--runs", default="runs/arms", help="where the logs go")
    compiling.add_argument("--seconds", type=float, default=300.0)
    compiling.add_argument("--warm", type=int, default=12, help="processes")
    warming = commands.add_parser("warm", help="compile the kernels of some sizes, in this process")
    warming.add_argument("--part", nargs=2, type=int, required=True, metavar=("I", "N"))
    for each in (running, compiling, warming):
        each.add_argument("--set", dest="settings", action="append", default=[], metavar="A.B=C")
    reporting = commands.add_parser("report", help="curves and a table of runs")
    reporting.add_argument("--runs", default="runs/arms")
    reporting.add_argument("-o", "--output", type=Path, default=Path("docs/results/smollm2-arms"))
    reporting.add_argument("--title", default="", help="of the page, in words")
    reporting.add_argument("--fact", dest="facts", action="append", default=[], metavar="NAME=VALUE",
                           help="model, GPU, versions, date: what runs do not record")  # fmt: skip
    reporting.add_argument("--note", dest="notes", action="append", default=[], metavar="TEXT", help="a paragraph")
    options = parser.parse_args()
    for name in ("arms", "seeds"):  # one named twice would be two processes in one run directory
        setattr(options, name, list(dict.fromkeys(getattr(options, name, []))))
    if options.command == "warm":
        warm(options.settings, *options.part)
        return
    try:
        code = {"run": run, "kernels": kernels, "report": report}[options.command](options)
    except TrainerError as error:
        say(str(error))
        code = 2
    raise SystemExit(code)


if __name__ == "__main__":
    main()
