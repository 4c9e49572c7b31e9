"""Ways to draft, measured beside a plain server on the same prompts."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dflash.acceptance import tau_of_counts
from dflash.agreement import tie_bound
from jobs.base.config import Config
from jobs.base.console import console, short_name
from jobs.base.devices import served_dtype
from jobs.dataset.slices import Row, domains
from jobs.proof.draft_methods import Method
from jobs.proof.greedy_requests import as_request
from jobs.proof.measurements import READ
from jobs.proof.speed import speed_domain, speed_loads
from jobs.servers.configured import server
from jobs.servers.server_pool import require, serving
from serving.client import Completion, Request, Speed, compare_speeds, complete
from serving.greedy import Reading, judge, read_again
from serving.vllm_counts import DECODE_STEPS, decode_steps, pooled_by_vllm
from serving.vllm_server import Server, drafts_per_round
from store.place import Place, read_json, write_json


def compare_methods(
    cfg: Config, methods: Sequence[Method], rows: list[Row], parts: Place
) -> list[Row]:
    """A row per method, `none` first. Each is kept in the folder `parts` as soon as it is measured.

    The plain server stays up, so that speed passes can alternate. Raises ValueError if two servers
    do not fit into memory, and if the engine does not count rounds (plain tau is not 1).
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
            part = f"{method.name}.json"
            if kept := read_json(parts, part, ["row", "speeds"]):
                row, of_method = kept["row"], [Speed(**one) for one in kept["speeds"]]
            else:
                console.print(f"{method.name}: {method.missing or 'serving'}")
                row, of_method = attempt(cfg, method, plain, rows, expected, control, narrow)
                if row["available"]:  # kept, so that a later run does not measure it again
                    kept = {"row": row, "speeds": [asdict(one) for one in of_method]}
                    write_json(parts, part, kept)
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
    """What was measured with this method, or why nothing was. Raises ValueError if the plain server
    has died.
    """
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
    """The plain server's own speed at one concurrency, over its passes beside all methods."""
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
    """The speed at one concurrency: tokens per second of each pass, ratios, latency."""
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
