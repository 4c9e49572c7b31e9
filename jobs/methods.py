"""flywheel methods [methods.names=ngram,dflash]

Other ways to draft, on the same traffic: serve the target with vLLM once without speculation and
once with each method, send the held-out prompts to all of them, and put tau, tokens per second,
latency and text side by side. What cannot run here is listed with the reason. Kept in
<work>/methods.
"""

import importlib.util
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dflash.acceptance import tau_of_counts
from dflash.agreement import tie_bound
from dflash.checkpoint import read_config
from dflash.target_model import target_id
from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.base.console import console, print_table, short_name
from jobs.base.target_facts import none_of_target, target_config
from jobs.dataset.samples import load_rows
from jobs.evaluate import domains, find_drafter, save_json
from jobs.fleet.server_pool import require, serving
from jobs.proof.measurements import (
    READ,
    RULE,
    as_request,
    pooled_by_vllm,
    speed_domain,
    speed_loads,
    warn_if_unsteady,
)
from jobs.registry.versions import resolve
from jobs.reporting.methods_table import columns, lines
from jobs.serve import dtype_name, served_dtype, server, verified_k, vllm_version
from serving.client import Completion, Request, Speed, compare_speeds, complete
from serving.greedy import Reading, judge, read_again
from serving.server import Server, drafts_per_round
from serving.vllm_counts import DECODE_STEPS, decode_steps
from store.files import read_json
from store.ids import short_hash

Row = dict[str, Any]
MTP_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Where configs say how many layers predict further tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One way to draft: at most `k` tokens in a round, by batch size as in serving.server.Server.

    Without `model`, MTP drafts with heads of the target, and the others look up what was said.
    """

    name: str
    k: list[int] = field(default_factory=list)
    options: dict[str, int] = field(default_factory=dict)  # of vLLM's speculative config
    model: Path | None = None
    missing: str = ""  # why it cannot be tried

    @property
    def settings(self) -> Row:
        """What a reader needs to know of it."""
        model = {"model": self.model.name} if self.model else {}
        return {"k": self.k, **self.options, **model} if self.k else {}

    @property
    def files(self) -> list[list[Any]]:
        """The files of its model, which a result depends on."""
        found = sorted(self.model.iterdir()) if self.model else []
        return [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in found]


def run(cfg: Config) -> dict[str, Any]:
    """Compare `methods.names` with no speculation; returns (or finds again) the measurements.

    Raises ValueError without held-out samples, and for a model folder that is none.
    """
    methods = [describe(cfg, name) for name in cfg.methods.names]
    rows = load_rows(cfg, cfg.evaluate.split)
    rows = [row for row in rows if len(row["output_ids"]) > 1]
    if not rows:
        fix = "ingest more conversations or set evaluate.split"
        raise none_of_target(cfg, f"greedy {cfg.evaluate.split} sample", fix)
    path = result_path(cfg, methods, rows)
    if path.is_file():
        return read_json(path, ["stage"]) | {"reused": True}
    result = {
        "stage": "methods",
        "target_id": target_id(cfg.target_path),
        "vllm": vllm_version(),
        "split": cfg.evaluate.split,
        "requests": len(rows),
        "speed_domain": speed_domain(cfg, rows),
        "repeats": cfg.verify.repeats,
        "methods": compare(cfg, methods, rows, path.with_suffix("")),
    }
    show(result)
    return save_json(path, result) | {"reused": False}


def result_path(cfg: Config, methods: Sequence[Method], rows: Sequence[Row]) -> Path:
    """Where the result stands for these methods, prompts, settings and this vLLM."""
    settings = [asdict(cfg.verify), asdict(cfg.serve), dtype_name(cfg), target_id(cfg.target_path)]
    tried = [[m.name, m.settings, m.files, m.missing] for m in methods]
    key = short_hash([tried, [row["sample_id"] for row in rows], settings, vllm_version(), RULE])
    return cfg.path("methods", f"{key}.json")


def describe(cfg: Config, name: str) -> Method:
    """The method `name` of the `methods` section, with what it lacks."""
    if name == "dflash":
        return dflash(cfg)
    ours = cfg.methods
    options, model, missing = {}, model_folder(cfg, name), ""
    if name == "ngram":
        options = {"prompt_lookup_min": ours.ngram_min, "prompt_lookup_max": ours.ngram_max}
    elif name == "suffix":
        # Speed passes repeat their prompts: with a cache they would find their own answers.
        options = {"suffix_decoding_max_cached_requests": 0}
        if importlib.util.find_spec("arctic_inference") is None:
            missing = "the package arctic-inference is not installed"
    elif model is None and name != "mtp":
        missing = f"no model: methods.{name} names no folder"
    elif model is None and not has_mtp_heads(target_config(cfg)):
        missing = "the target has no MTP heads, and methods.mtp names no folder"
    return Method(name=name, k=ours.k, options=options, model=model, missing=missing)


def dflash(cfg: Config) -> Method:
    """methods.dflash, else the champion, else the newest drafter, with the K that it is served."""
    folder = model_folder(cfg, "dflash")
    if folder is None:
        champion = resolve(cfg, "champion")
        folder = champion[1] if champion else None
    if folder is None:
        if not any(cfg.path("drafters").glob("[!.]*/config.json")):
            return Method(name="dflash", missing=f"no drafter in {cfg.path('drafters')}")
        folder = find_drafter(cfg, "")
    k = cfg.serve.k or verified_k(cfg, folder) or [read_config(folder).num_drafts]
    return Method(name="dflash", k=k, model=folder)


def model_folder(cfg: Config, name: str) -> Path | None:
    """The folder that methods.NAME names, if any. Raises ValueError if it holds no model."""
    folder = getattr(cfg.methods, name, "")
    if folder and not (Path(folder) / "config.json").is_file():
        raise ValueError(f"methods.{name} = {folder}: not a model folder, it has no config.json")
    return Path(folder) if folder else None


def has_mtp_heads(config: dict[str, Any]) -> bool:
    """Whether a target's config names layers for multi-token prediction."""
    parts = [config, config.get("text_config") or {}]
    return any(part.get(name) for part in parts for name in MTP_LAYERS)


def compare(cfg: Config, methods: Sequence[Method], rows: list[Row], parts: Path) -> list[Row]:
    """A row per method, `none` first, each kept in `parts` as soon as it is measured.

    The plain server stays up, so speeds are interleaved.
    """
    domain = speed_domain(cfg, rows)
    narrow = [as_request(row) for row in rows if row["domain"] == domain]
    require(cfg, max((m.model for m in methods if m.model), key=_size, default=None), 2, "methods")
    found, speeds = [], []
    with start(cfg, Method(name="none")) as plain:
        console.print("none: serving")
        expected, counts = ask(cfg, plain.url, rows, "none")
        none = {"method": "none", "settings": {}, "available": True, **acceptance(counts)}
        if none["tau"]["pooled"] != 1.0:
            raise ValueError(
                f"without a drafter vLLM counted {none['rounds']} steps for {none['tokens']} "
                f"tokens: {DECODE_STEPS} does not count rounds on this engine, so no tau is known"
            )
        control = read_again(plain.url, expected, READ, "control")
        for method in methods:
            part = parts / f"{method.name}.json"
            if part.is_file():
                kept = read_json(part, ["row", "speeds"])
                row, of_method = kept["row"], [Speed(**one) for one in kept["speeds"]]
            else:
                console.print(f"{method.name}: {method.missing or 'serving'}")
                row, of_method = attempt(cfg, method, plain, rows, expected, control, narrow)
                if row["available"]:  # an interrupted run does not measure it again
                    save_json(part, {"row": row, "speeds": [asdict(one) for one in of_method]})
            found.append({"method": method.name, "settings": method.settings, **row})
            speeds.append(of_method)
    plain_speeds = [plain_alone(at_once) for at_once in zip(*filter(None, speeds), strict=True)]
    return [{**none, "speeds": [summarise(one) for one in plain_speeds]}, *found]


def attempt(
    cfg: Config,
    method: Method,
    plain: Server,
    rows: list[Row],
    expected: list[Completion],
    control: Reading,
    narrow: list[Request],
) -> tuple[Row, list[Speed]]:
    """What was measured with this method, or why nothing was."""
    if method.missing:
        return {"available": False, "reason": method.missing}, []
    try:
        with start(cfg, method) as running:
            answers, counts = ask(cfg, running.url, rows, method.name)
            reading = read_again(plain.url, answers, READ, f"{method.name}, read again")
            sides = (lambda: plain.url, lambda: running.url)
            speeds = compare_speeds(sides, speed_loads(cfg, narrow), cfg.verify.repeats)
        text = judge(expected, answers, control, reading, tie_bound(served_dtype(cfg)))
    except ValueError as error:
        if not plain.is_up():
            raise
        return {"available": False, "reason": str(error)}, []
    drafting = sum(a.spec["num_spec_steps"] for a in answers if a.spec)
    row = {
        "available": True,
        **acceptance(counts),
        "rounds_with_drafts": drafting,
        "vllm_mean_acceptance_length": pooled_by_vllm(answers) if drafting else None,
        "greedy": {
            "requests": text.requests,
            "identical": text.identical,
            "near_ties": len(text.near_ties),
            "different": len(text.different),
            "lost": [reading.lost, reading.tokens],
            "control_lost": [control.lost, control.tokens],
        },
        "speeds": [summarise(one) for one in speeds],
    }
    return row, speeds


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def start(cfg: Config, method: Method) -> Server:
    """The server for one method, not started; all share the settings of `flywheel verify`."""
    if method.name == "dflash":
        ours = serving(cfg, str(method.model), method.k)
    else:
        ours = serving(cfg, "", [])
    if method.name not in ("none", "dflash"):
        config = {"method": method.name, **drafts_per_round(method.k), **method.options}
        config |= {"model": str(method.model)} if method.model else {}
        more = ["--speculative-config", json.dumps(config)]
        more += ["--per-request-spec-decode-metrics", "detailed"]
        ours = ours.override("serve", args=[*ours.serve.args, *more])
    return server(ours, f"methods-{method.name}.log")


def ask(
    cfg: Config, url: str, rows: list[Row], label: str
) -> tuple[list[Completion], dict[str, tuple[int, int]]]:
    """Answers in the order of the rows; per domain, tokens after the first and rounds."""
    answers: dict[int, Completion] = {}
    counts = {}
    for name in domains(rows):
        mine = [i for i, row in enumerate(rows) if row["domain"] == name]
        before = decode_steps(url)
        requests = [as_request(rows[i]) for i in mine]
        found = complete(url, requests, cfg.verify.concurrency, f"{label}, {short_name(name)}")
        tokens = sum(len(answer.output_ids) - 1 for answer in found)
        counts[name] = (tokens, decode_steps(url) - before)
        answers |= zip(mine, found, strict=True)
    return [answers[i] for i in range(len(rows))], counts


def acceptance(counts: dict[str, tuple[int, int]]) -> Row:
    """Tau pooled and by domain, from (tokens, rounds) of each domain."""
    tokens, rounds = (sum(pair[i] for pair in counts.values()) for i in (0, 1))
    return {
        "tau": {
            "pooled": tau_of_counts(tokens, rounds),
            "domains": {name: tau_of_counts(*pair) for name, pair in counts.items()},
        },
        "tokens": tokens,
        "rounds": rounds,
    }


def plain_alone(at_once: Sequence[Speed]) -> Speed:
    """The plain server at one concurrency, over the passes beside every method."""
    rates = [rate for one in at_once for rate in one.plain]
    seconds = [second for one in at_once for second in one.plain_seconds]
    return Speed(
        concurrency=at_once[0].concurrency,
        plain=rates,
        drafted=rates,
        ratios=[1.0],
        ratio=1.0,
        plain_seconds=seconds,
        drafted_seconds=seconds,
    )


def summarise(speed: Speed) -> Row:
    """One concurrency: tokens per second pass by pass, their ratios, seconds per request."""
    found = asdict(speed)
    del found["plain_seconds"]
    return found | {"latency": latency(found.pop("drafted_seconds"))}


def latency(seconds: Sequence[float]) -> Row:
    """Median and 95th percentile (nearest rank) of the seconds from request to answer.

    [1, 2, ..., 20] -> median 10.5, p95 19. Raises ValueError for none.
    """
    if not seconds:
        raise ValueError("no request, no latency")
    rank = -(-95 * len(seconds) // 100)
    return {
        "requests": len(seconds),
        "median": statistics.median(seconds),
        "p95": sorted(seconds)[rank - 1],
    }


def show(result: Row) -> None:
    """The table: a line per method, or why there is none."""
    title = f"Methods on {result['requests']} held-out prompts, speed on {result['speed_domain']}"
    print_table(title, columns(result), lines(result))
    drafted = result["methods"][1:]
    warn_if_unsteady("methods", [s for row in drafted for s in row.get("speeds", [])])


if __name__ == "__main__":
    run_as_module("methods")
