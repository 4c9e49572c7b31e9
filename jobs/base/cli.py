"""The `flywheel` command: parse, load the config, run one stage.

    flywheel <stage> [--config FILE] [--debug] [--plan] [--format FORMAT] [--explain FILE]
                     [--submit URL] [section.key=value ...]

A stage is a module with `run(cfg: Config) -> dict`. What it prints for people goes to stderr
(jobs/base/console.py); the summary it returns is printed as one JSON line, the last line on stdout.
An empty one is not printed. A summary with `"ok": false` makes the exit code 1, or what its `exit`
says; a ValueError, an OSError or the death of a Ray worker is a message to the user and makes it 2.
Stages are imported only when they run: help works whatever is installed.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, NoReturn

from jobs.base.console import visible

if TYPE_CHECKING:  # it imports Arrow, which help does not need
    from jobs.base.config import Config

STAGES = {
    "target": ("jobs.target", "fetch and convert the demo target"),
    "traffic": ("jobs.traffic", "the demo's simulated clients -> capture/"),
    "ingest": ("jobs.ingest", "request logs -> traffic/"),
    "regenerate": ("jobs.regenerate", "prompts of a former target, answered by the present one"),
    "select": ("jobs.select", "traffic/ -> selection/: what is learned from, within budgets"),
    "harvest": ("jobs.harvest", "selection/ -> features/, one pass of the target"),
    "train": ("jobs.train", "features/ -> a drafter"),
    "convert": ("jobs.convert", "a drafter folder between z-lab's and speculators' format"),
    "evaluate": ("jobs.evaluate", "replay a drafter on held-out conversations -> acceptance/"),
    "preflight": ("jobs.preflight", "prove a drafter on the engine that will serve it"),
    "promote": ("jobs.promote", "make an evaluated drafter the champion, if the gate passes"),
    "history": ("jobs.history", "every decision about champions: who, when, why, with numbers"),
    "rollback": ("jobs.rollback", "make the previous champion the champion again"),
    "serve": ("jobs.serve", "run vLLM with the target and a drafter"),
    "fleet": ("jobs.fleet", "replicas of vLLM behind one endpoint, until Ctrl-C"),
    "rollout": ("jobs.rollout", "bring the fleet to the champion: a canary, then all, or back"),
    "verify": ("jobs.verify", "serve a drafter: served beside replayed tau, text, speed"),
    "methods": ("jobs.methods", "other ways to draft on the same traffic: tau, speed, latency"),
    "report": ("jobs.report", "one HTML page about what was measured"),
    "sql": ("jobs.sql", "answer a question over the tables (flywheel sql NAME, or shell)"),
    "ui": ("jobs.ui", "one page in a browser: the loop, its champions, windows and data"),
    "gc": ("jobs.gc", "compact tables, remove what no live version needs"),
    "cache": ("jobs.cache", "keep the feature cache within its size and age"),
    "migrate": ("jobs.migrate", "bring a work folder of an earlier release to today's layout"),
    "doctor": ("jobs.doctor", "check this machine and say what to do"),
    "retrain": ("pipelines.retrain", "new traffic -> a new champion in the fleet, one window"),
    "watch": ("pipelines.watching", "is it time to retrain? the triggers, and what each sees"),
    "demo": ("pipelines.demo", "turn the whole loop once"),
    "demo-fleet": ("pipelines.demo_fleet", "go on from the demo: a fleet, two roll-outs"),
    "config": ("", "print every setting with its value and meaning, as YAML"),
}
# The first word without "=" sets this setting: `flywheel sql tau_by_domain_and_version`.
POSITIONAL = {
    "sql": "sql.question",
    "evaluate": "evaluate.drafter",
    "preflight": "preflight.drafter",
    "promote": "promote.drafter",
    "fleet": "fleet.action",
    "verify": "verify.drafter",
}
# Stages with `plan(cfg)`: what `run` would do, for --plan.
PLANNED = ("regenerate", "select", "train", "promote", "rollout", "retrain", "watch", "gc", "cache")
# Stages that do not read what other stages wrote.
ANY_LAYOUT = ("migrate", "doctor", "target")
# Import name -> the extra that installs it, for the message about a missing package.
EXTRAS = {
    "ray": "ray",
    "mlflow": "ray",
    "duckdb": "ray",
    "matplotlib": "ray",
    "jinja2": "ray",
    "starlette": "ray",
    "uvicorn": "ray",
    "vllm": "serve",
    "httpx": "serve",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one stage and return the exit code: 0 done, 1 not ok, 2 user error, 130 interrupted.

    `retrain` and `watch` have others, see docs/how-to/retrain.md.
    """
    args = _parser().parse_intermixed_args(argv)
    from jobs.base.config import commented, load

    try:
        if args.plan and args.stage not in PLANNED:
            raise ValueError(f"{args.stage} has no --plan; only {', '.join(PLANNED)}")
        if args.format and args.stage != "sql":
            raise ValueError(f"{args.stage} has no --format; only sql")
        if args.explain and args.stage != "ingest":
            raise ValueError(f"{args.stage} has no --explain; only ingest")
        settings = _settings(args.stage, args.settings)
        settings += [f"sql.format={args.format}"] if args.format else []
        settings += [f"ingest.logs={json.dumps([args.explain])}"] if args.explain else []
        cfg = load(args.config, settings)
        if args.stage == "config":
            to_stdout(commented(cfg), end="")
            return 0
        if args.submit:
            from jobs.base.submission import submit

            words = [*(["--plan"] if args.plan else []), *settings]
            return submit(args.submit, STAGES[args.stage][0], words, args.config, cfg)
        return _run(args.stage, cfg, "explain" if args.explain else "plan" if args.plan else "run")
    except KeyboardInterrupt:
        print("interrupted: the same command continues where this one stopped", file=sys.stderr)
        return 130
    except Exception as error:
        message = None if args.debug else _message(error)
        if message is None:
            raise
        print(f"error: {visible(message, lines=True)}", file=sys.stderr)
        return 2


def run_as_module(stage: str) -> NoReturn:
    """`python -m jobs.<stage> ...` = `flywheel <stage> ...`.

    The stage is imported again under its real name: what Ray pickles must not belong to __main__.
    """
    raise SystemExit(main([stage, *sys.argv[1:]]))


def _run(stage: str, cfg: "Config", function: str) -> int:
    from jobs.base.stage_log import logged
    from store.former_layout import is_former

    if stage not in ANY_LAYOUT and cfg.place().is_local and is_former(cfg.place().path):
        raise ValueError(
            f"{cfg.place()} has the layout of an earlier release: run `flywheel migrate` with the "
            "same settings, once"
        )
    call = getattr(importlib.import_module(STAGES[stage][0]), function)
    summary = logged(cfg, stage, call) if function == "run" else call(cfg)
    if sys.stderr is not None:
        sys.stderr.flush()
    if summary:  # empty: its answer is on stdout already
        to_stdout(json.dumps(summary))
    return summary.get("exit", 0 if summary.get("ok", True) else 1)


def to_stdout(text: str, end: str = "\n") -> None:
    """Print to stdout. A reader may have closed it (`flywheel config | head`): that is no error."""
    try:
        print(text, end=end, flush=True)
    except BrokenPipeError:
        # Discard what is still buffered; otherwise Python reports an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _settings(stage: str, words: list[str]) -> list[str]:
    if stage not in POSITIONAL:
        return words
    named = next((i for i, word in enumerate(words) if "=" not in word), None)
    words = [f"{POSITIONAL[stage]}={word}" if i == named else word for i, word in enumerate(words)]
    return _question_words(words) if stage == "sql" else words


def _question_words(words: list[str]) -> list[str]:
    """The words of `flywheel sql`, with the parameters of the question as one setting: name=value
    where the name has no dot and is no setting, such as work.
    """
    from jobs.base.config import Config

    whole = {field.name for field in fields(Config) if field.default is not MISSING}
    mine = [w for w in words if (n := w.partition("=")[0]) != w and "." not in n and n not in whole]
    others = [word for word in words if word not in mine]
    return [*others, f"sql.parameters={json.dumps(mine, ensure_ascii=False)}"] if mine else others


def _message(error: Exception) -> str | None:
    """What to tell the user, or None when the traceback is needed."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception):  # Ray wraps a task's error; its own text is a remote traceback
        return _message(cause)
    if _is_of_ray(error):
        from store.place import first_line

        return (
            f"a part of the work on Ray failed: {first_line(error)} If memory ran out, free some "
            "or lower ray.num_cpus; then run the same command again"
        )
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, ValueError | OSError):
        return str(error)
    if not isinstance(error, ModuleNotFoundError):
        return None
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return None
    extra = f"dflash-flywheel[{EXTRAS[package]}]"
    return f"{package} is not installed: `make venv`, or pip install '{extra}'"


def _is_of_ray(error: Exception) -> bool:
    """Whether it says that something of Ray died or failed, and not what a task raised. Ray is not
    imported for that: an error of a module that nobody imported does not exist.
    """
    ray = sys.modules.get("ray.exceptions")
    if ray is None:
        return False
    return isinstance(error, ray.RayError) and not isinstance(error, ray.RayTaskError)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {visible(message)}\n`flywheel --help` lists the stages\n")


def _stage(name: str) -> str:
    if name in STAGES:
        return name
    close = get_close_matches(name, STAGES, n=1)
    hint = f"did you mean {close[0]}?" if close else f"one of {', '.join(STAGES)}"
    raise argparse.ArgumentTypeError(f"unknown stage {name!r}: {hint}")


def _parser() -> argparse.ArgumentParser:
    stages = "\n".join(f"  {name:10} {help}" for name, (_, help) in STAGES.items())
    parser = _Parser(
        prog="flywheel",
        description="Turns the traffic of a vLLM fleet into a better DFlash drafter for it.",
        epilog=f"stages:\n{stages}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("stage", type=_stage, metavar="stage", help="one of the stages below")
    parser.add_argument(
        "settings", nargs="*", metavar="section.key=value", help="see `flywheel config`"
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings")
    parser.add_argument(
        "--plan",
        "--dry-run",
        action="store_true",
        help="say what the stage would do, and change nothing",
    )
    parser.add_argument(
        "--format", metavar="FORMAT", help="of the answer of sql: table, csv, json or parquet"
    )
    parser.add_argument(
        "--explain",
        metavar="FILE",
        help="what ingest recognises in a log, folder or glob, and why it leaves records out",
    )
    parser.add_argument(
        "--submit",
        metavar="URL",
        help="run it on the Ray cluster whose dashboard is there, such as http://head:8265",
    )
    parser.add_argument("--debug", action="store_true", help="show the traceback of a user error")
    return parser
