"""`flywheel retrain` on a tiny target in processes that a test can kill, and what holds after it.

Every stage is the real one but preflight, which starts vLLM. What Ray would run in workers runs in
the command itself: a start of Ray takes longer than the window.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
from ray.train import ScalingConfig
from safetensors import safe_open

from dflash.decode import decode
from dflash.target_model import load_target
from dflash.training_step import generator
from jobs import train
from jobs.base import cli
from jobs.base.config import Config
from jobs.harvesting import actors
from jobs.ingestion import log_tasks
from jobs.registry.versions import Registry
from jobs.training import ray_trainer
from jobs.training.validation import Choice, Taus
from pipelines import retrain
from store import windows
from store.lease import held_leases
from store.schemas import TABLES
from tests.helpers.capture_logs import SameProcess
from tests.helpers.harvesting import here
from tests.helpers.promotion import actions, aliases
from tests.helpers.retraining import GATE
from tests.helpers.tiny import make_target
from tests.helpers.work import SETTINGS, record

ROOT = Path(__file__).parents[2]


def make_work(folder: Path) -> list[str]:
    """A target and its first log below `folder`; returns the words of the command."""
    (folder / "work" / "capture").mkdir(parents=True)
    (folder / "gate.yaml").write_text(GATE)
    words = [f"work={folder / 'work'}", *SETTINGS, f"promote.gate={folder / 'gate.yaml'}"]
    make_target(folder / "work" / "target")
    add_log(folder / "work", 0, 48)
    words += ["train.steps=6", "train.val_every=3", "train.checkpoint_every=2"]
    return [*words, "retrain.min_tokens=100", "evaluate.bootstrap=100"]


def add_log(work: Path, first: int, count: int) -> None:
    """A log of `count` greedy answers to prompts that no other log has, in two domains."""
    target = load_target(work / "target", torch.float32)
    lines = []
    for i in range(first, first + count):
        prompt = torch.randint(1, 90, (4 + i % 5,), generator=generator("window", i)).tolist()
        lines.append(json.dumps(record(i, prompt, decode(target, prompt, 20, [0]).output_ids)))
    (work / "capture" / f"log-{first}.jsonl").write_text("\n".join(lines) + "\n")


class Commands:
    """Runs `flywheel retrain` in children of a process that has imported everything: a kill hits
    the stages, not their imports.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command, pipe = [sys.executable, "-m", __name__, str(folder)], subprocess.PIPE
        self.parent = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)

    def start(self, words: list[str], most: int = -1) -> int:
        """The id of a new process. `most`: bytes that a file may have, as on a disk that is full
        for everything larger.
        """
        return self._ask([words, most])

    def code(self, process: int) -> int:
        """Its exit code once it has ended; negative for a signal."""
        return self._ask(process)

    def said(self, process: int) -> str:
        """What it has printed."""
        return (self.folder / str(process)).read_text()

    def run(self, words: list[str], most: int = -1) -> tuple[int, str]:
        """(exit code, what it printed) of a command that nobody disturbs."""
        process = self.start(words, most)
        return self.code(process), self.said(process)

    def killed(self, words: list[str], moment: Callable[[], bool], after: float = 0.0) -> bool:
        """SIGKILL a command so many seconds after `moment`; whether it was still running."""
        process = self.start(words)
        while not moment():
            time.sleep(0.01)
        time.sleep(after)
        os.kill(process, signal.SIGKILL)  # one that has ended is there until `code`
        code = self.code(process)
        assert code in (0, -signal.SIGKILL), self.said(process)
        return code != 0

    def _ask(self, what: Any) -> int:
        assert self.parent.stdin
        assert self.parent.stdout
        print(json.dumps(what), file=self.parent.stdin, flush=True)
        return int(self.parent.stdout.readline())

    def __enter__(self) -> "Commands":
        return self

    def __exit__(self, *error: object) -> None:
        self.parent.communicate()


def _answer(folder: Path) -> None:
    """The other side of `Commands`: words start a process, a process id waits for its end."""
    _import_what_stages_import_late()
    for line in sys.stdin:
        asked = json.loads(line)
        if isinstance(asked, int):
            print(os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1]), flush=True)
        elif child := os.fork():
            print(child, flush=True)
        else:
            words, most = asked
            os._exit(_retrain(words, most, folder / str(os.getpid())))


def _import_what_stages_import_late() -> None:
    for name in ("transformers.models.llama.modeling_llama", "matplotlib.pyplot", "mlflow.data"):
        import_module(name)


def _retrain(words: list[str], most: int, said: Path) -> int:
    with open(said, "w") as stream, open(os.devnull) as nothing:
        for number, file in enumerate((nothing, stream, stream)):
            os.dup2(file.fileno(), number)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
    try:
        _without_ray()
        code = cli.main(["retrain", *words])
    except BaseException:  # noqa: BLE001 (a child of a fork must not go on as its parent)
        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _without_ray() -> None:
    """Run in this process what Ray would, and nothing of vLLM."""
    torch.set_num_threads(1)
    log_tasks.ray = SameProcess
    actors.by_actors = here
    retrain.cluster = train.cluster = lambda cfg: nullcontext()
    local = ScalingConfig(num_workers=0)
    ray_trainer.scaling = lambda cfg: local
    passed = ("preflight", lambda cfg: {"ok": True, "checks": []})
    retrain.DELIVER = [one if one[0] != "preflight" else passed for one in retrain.DELIVER]
    # A random target has little to learn: without this, a later window ends as `unchanged`.
    real = Choice.offer

    def offer(self: Choice, step: int, taus: Taus, domain: str, max_slice_loss: float) -> bool:
        return real(self, step, taus, domain, max_slice_loss) or bool(step)

    Choice.offer = offer


def check_consistent(cfg: Config) -> None:
    """One consistent state: each window, step, sample, version and decision once, no half-written
    file at a final name, no lease held.
    """
    rows = cfg.table("windows").read(["window", "step"]).to_pylist()
    assert len({tuple(row.values()) for row in rows}) == len(rows), "a step has two rows"
    found = windows.read(cfg.table("windows"))
    assert [one.number for one in found] == [*range(1, len(found) + 1)]
    assert {one.state for one in found} == {"promoted"}
    steps = {name for one in found for name, _ in (*retrain.LEARN, *retrain.DELIVER)}
    for one in found:
        assert {*one.rows} == steps | {"window", "ingest"}
        assert all(one.is_done(step) for step in steps | {"ingest"}), one.rows
    # A window begins at the version where the one before ended, so no sample is in two.
    ends = [one.whole["to_version"] for one in found]
    assert [one.whole["from_version"] for one in found] == [None, *ends[:-1]]
    samples = cfg.table("traffic").read(["sample_id"])["sample_id"].to_pylist()
    assert len(set(samples)) == len(samples)
    assert sum(sum(one.whole["numbers"]["samples"].values()) for one in found) == len(samples)
    # Versions and decisions.
    promoted = [one.numbers("promote")["version"] for one in found]
    assert promoted == [str(one.number) for one in found]
    former = [None, *promoted[:-1]]
    assert actions(cfg) == [("promote", *pair) for pair in zip(former, promoted, strict=True)]
    assert aliases(cfg)["champion"] == promoted[-1]
    assert len(Registry(cfg).all_tags()) == len(found)
    assert held_leases(cfg.place("leases")) == []
    check_files(cfg)


def check_files(cfg: Config) -> None:
    """Every file at a final name can be read to its end, and every shard of a table is there."""
    for path in cfg.path().rglob("*"):
        if path.name.startswith(".") or not path.is_file():
            continue
        if path.suffix == ".parquet":
            pq.read_table(path)
        elif path.suffix == ".json":
            [json.loads(line) for line in one_or_more(path)]
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt") as tensors:
                assert [tensors.get_tensor(name) for name in tensors.keys()]  # noqa: SIM118
        elif path.suffix == ".pt":
            torch.load(path, weights_only=False)
    for name in TABLES:
        assert cfg.table(name).lost() == [], name


def one_or_more(path: Path) -> list[str]:
    """JSON values of a file: one, or of a commit of Delta Lake one per line."""
    text = path.read_text()
    return text.splitlines() if path.parent.name == "_delta_log" else [text]


if __name__ == "__main__":
    _answer(Path(sys.argv[1]))
