"""The trial: the drafter on the engine that will serve it, on held-out prompts, token by token.

Every check compares what a real vLLM server did with our own forward on the very same tokens; where
they differ, dflash.diagnose tries the known faults and names the one that gives vLLM's drafts
again.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer

from dflash.acceptance import num_rounds
from dflash.checkpoint import load_drafter
from dflash.diagnose import (
    Agreement,
    Answer,
    Trace,
    compare,
    explain,
    fits_better,
    read_answer,
)
from dflash.hypotheses import AS_CONFIGURED, Hypothesis, hypotheses
from dflash.model import Drafter
from dflash.replay import Request as Recorded
from dflash.replay import replay
from dflash.target import Target, load_target
from jobs.config import Config
from jobs.doctor import Check
from jobs.endings import Endings, ask_endings, check_template
from jobs.samples import load_requests
from jobs.serve import served_dtype, server
from jobs.shape import none_of_target, target_config
from jobs.verify import TIE_BOUND, as_request, dtype_name, table
from serving.acceptance import rounds
from serving.checks import check_drafter
from serving.client import Completion, Request, complete, counter
from serving.drafts import drafted, read_drafts
from serving.server import vllm_runs_on_cpu

POOLED, POSITION = 0.01, 0.01
"""Served against replayed: pooled tau (relative), acceptance at each position (absolute)."""
MAX_TIES = 0.02
"""Share of drafts that may be near ties: a drafter that is never sure cannot be compared."""
FEATURE_ERROR = 0.05
"""Relative error per token, median: bfloat16 storage alone gives 0.002."""
PROBE_PROMPT, PROBE_TOKENS = 512, 32
"""Tokens of the prompt that is sent twice: several cache blocks, of which vLLM redoes the last."""
SPECIAL_TOKENS, SHOWN = 32, 20

Row = dict[str, Any]


@dataclass(frozen=True)
class Ours:
    """Our side: models in the served dtype, held-out rows, their harvested and fresh features."""

    target: Target
    drafter: Drafter
    rows: list[Row]
    recorded: list[Recorded]
    answers: list[Answer]
    table: list[Hypothesis]
    k: int
    bound: float  # logit gap of a near tie in this dtype

    @property
    def borrowed(self) -> tuple[Tensor, Tensor]:
        """The target's embedding and head."""
        return self.target.embedding, self.target.head


@dataclass(frozen=True)
class Served:
    """What the server answered; `probes` is one prompt sent twice, `hits` its cached tokens."""

    answers: list[Completion]
    probes: list[Completion]
    hits: float
    endings: Endings | None
    drafts: dict[str, list[list[int]]] | None  # None: this engine's drafts are not recorded


def trial(cfg: Config, folder: Path) -> tuple[list[Check], dict[str, Any]]:
    """Rows of the table, and the numbers behind them. Starts one vLLM server.

    Raises ValueError without held-out samples; a server that does not start is a row.
    """
    ours = prepare(cfg, folder)
    checks = [check_features(ours), check_fit(ours)]
    try:
        served = serve(cfg, folder, ours.rows, ours.k)
    except ValueError as error:
        fix = "the message is the server's own; `flywheel doctor` checks the machine"
        return [*checks, Check("server", str(error), "fail", fix)], {}
    answers = [_answer_of(ours, completion) for completion in served.answers + served.probes]
    checks += [check_text(answers, ours.bound), check_template(cfg, served.endings)]
    tau_check, measured = check_tau(ours, served)
    if served.drafts is None:
        fix = "our worker records drafts on CPUs only; tau below still compares the counts"
        return [*checks, Check("drafts", "not recorded", "skip", fix), tau_check], measured
    *cold, warm = traces(ours, served, answers)
    row, found = check_drafts(ours, cold)
    checks.append(row)
    if row.status == "ok":
        checks.append(check_cache(ours, [warm], served.hits))
    checks.append(tau_check)
    return checks, measured | found


def traces(ours: Ours, served: Served, answers: Sequence[Answer]) -> list[Trace]:
    """What was drafted for each answer, named by its sample; the last is the cached probe."""
    assert served.drafts is not None
    names = [*(row["sample_id"] for row in ours.rows), "probe", "probe, cached"]
    return [
        Trace(name, answer, rounds(c)[0], torch.tensor(drafted(c, served.drafts)))
        for name, c, answer in zip(names, served.answers + served.probes, answers, strict=True)
    ]


def prepare(cfg: Config, folder: Path) -> Ours:
    """Load both models and read the first `preflight.requests` held-out answers once more."""
    rows, recorded = load_requests(cfg, cfg.evaluate.split)
    chosen = [i for i, row in enumerate(rows) if len(row["output_ids"]) > 1]
    chosen = chosen[: cfg.preflight.requests]  # in order of a hash: as good as drawn
    if not chosen:
        fix = "ingest more conversations or set evaluate.split"
        raise none_of_target(cfg, f"greedy {cfg.evaluate.split} sample", fix)
    dtype = served_dtype(cfg)
    target, drafter = load_target(cfg.target_path, dtype), load_drafter(folder, dtype)
    return Ours(
        target=target,
        drafter=drafter,
        rows=[rows[i] for i in chosen],
        recorded=[recorded[i] for i in chosen],
        answers=[
            read_answer(target, drafter.cfg, rows[i]["prompt_ids"], rows[i]["output_ids"])
            for i in chosen
        ],
        k=max(check_drafter(folder, cfg.target_path, cfg.serve.k, cfg.serve.max_model_len)),
        table=hypotheses(drafter.cfg, _thetas(cfg), _special_tokens(cfg)),
        bound=TIE_BOUND[dtype_name(cfg)],
    )


def _thetas(cfg: Config) -> list[float]:
    """The target's base, and what Transformers and vLLM take for a missing one."""
    target = target_config(cfg)
    own = (target.get("rope_parameters") or target).get("rope_theta", 1e4)
    return [float(own), 1e4, 1e6]


def _special_tokens(cfg: Config) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(cfg.target_path, local_files_only=True)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return sorted(special | set(tokenizer.all_special_ids), reverse=True)[:SPECIAL_TOKENS]


def serve(cfg: Config, folder: Path, rows: Sequence[Row], k: int) -> Served:
    """Ask a server with the settings of `serve`, on a port of its own. ValueError if it fails.

    One K, the largest, at every batch size: served rounds are then replayed rounds.
    """
    settings = {"host": "127.0.0.1", "port": 0, "drafter": str(folder), "k": [k], "capture": ""}
    running = server(cfg.override("serve", **settings), "preflight.log")
    path = cfg.path("logs", "preflight-drafts.jsonl")
    running.drafts = path if vllm_runs_on_cpu() else None
    with running:
        asked = [as_request(row) for row in rows]
        answers = complete(running.url, asked, cfg.preflight.concurrency, "served")
        endings = ask_endings(cfg, running.url)
        before = counter(running.url, "vllm:prefix_cache_hits_total")
        ask = [probe(rows, cfg.serve.max_model_len - 2 * (k + 1))]
        probes = [*complete(running.url, ask, 1), *complete(running.url, ask, 1)]
        hits = counter(running.url, "vllm:prefix_cache_hits_total") - before
    recorded = None if running.drafts is None else read_drafts(path)
    return Served(answers, probes, hits, endings, recorded)


def probe(rows: Sequence[Row], limit: int) -> Request:
    """A prompt of several cache blocks: held-out samples end to end. It does not begin as they do,
    so that the first of the two requests finds nothing in the cache. With its answer it stays below
    `limit` tokens: close to max_model_len vLLM stops drafting.
    """
    ids = [token for row in rows for token in [*row["prompt_ids"], *row["output_ids"]]]
    size = min(PROBE_PROMPT, limit - PROBE_TOKENS)
    return Request(
        prompt=(ids * (1 + size // len(ids)))[1 : size + 1],
        max_tokens=PROBE_TOKENS,
        extra={"ignore_eos": True},
    )


def _answer_of(ours: Ours, completion: Completion) -> Answer:
    """The served answer as our target reads it; most are the recorded ones, read already."""
    ids = torch.tensor([*completion.prompt_ids, *completion.output_ids])
    for answer in ours.answers:
        if answer.num_prompt == len(completion.prompt_ids) and torch.equal(answer.ids, ids):
            return answer
    return read_answer(ours.target, ours.drafter.cfg, completion.prompt_ids, completion.output_ids)


# ---------------------------------------------------------------------------------------------
# Checks


def check_features(ours: Ours) -> Check:
    """The harvested features are this target's, at these layers."""
    errors = {}
    for shift in (0, 1, -1):
        if all(tap + shift in ours.answers[0].layers for tap in ours.drafter.cfg.target_layer_ids):
            errors[shift] = _feature_error(ours, shift)
    best = min(errors, key=lambda shift: errors[shift])
    text = f"harvested and fresh features differ by {errors[0]:.2%} per token (median)"
    if best == 0 and errors[0] <= FEATURE_ERROR:
        return Check("features", text)
    if best != 0:
        text += f"; those of one layer {'later' if best > 0 else 'earlier'} by {errors[best]:.2%}"
    fix = "delete features/, harvest and train again: replay and training read what is not served"
    return Check("features", text, "fail", fix)


def _feature_error(ours: Ours, shift: int) -> float:
    each = []
    for answer, recorded in zip(ours.answers, ours.recorded, strict=True):
        fresh = answer.request(ours.drafter.cfg.target_layer_ids, shift).features.float()
        error = (recorded.features.float() - fresh).norm(dim=1) / fresh.norm(dim=1)
        each.append(error)
    return float(torch.cat(each).median())


def check_fit(ours: Ours) -> Check:
    """No other reading of config.json makes the drafter accept more than its own."""
    better = fits_better(ours.table, ours.drafter, *ours.borrowed, ours.answers, ours.k)
    if not better:
        return Check("fit", f"none of {len(ours.table)} other readings of config.json accepts more")
    best, right, own = better[0]
    text = (
        f"under '{best.name}' {right:.2f} drafts in a row are right, as configured {own:.2f}: "
        f"{best.cause}"
    )
    fix = f"the weights were trained that way: {best.remedy}; or train again"
    return Check("fit", text, "fail", fix)


def check_text(answers: Sequence[Answer], bound: float) -> Check:
    """Every served token is the argmax of our target, up to near ties."""
    gaps = torch.cat([answer.gaps for answer in answers])
    ties, wrong = int(((gaps > 0) & (gaps < bound)).sum()), int((gaps >= bound).sum())
    text = f"{len(gaps)} served tokens: {ties} near ties, {wrong} are not the target's argmax"
    if not wrong:
        return Check("served target", text)
    fix = (
        "the engine serves another target, dtype or quantisation than target.path and target.dtype "
        f"say (largest gap {float(gaps.max()):.3g}); compare serve.args"
    )
    return Check("served target", text, "fail", fix)


def check_drafts(ours: Ours, traces: Sequence[Trace]) -> tuple[Check, dict[str, Any]]:
    """VLLM's drafts are ours, token by token; otherwise which fault makes them so."""
    own = compare(AS_CONFIGURED, ours.drafter, *ours.borrowed, traces)
    ties = own.near_ties(ours.bound)
    found = {
        "drafts": own.drafts,
        "near_ties": [asdict(m) for m in ties],
        "different": len(own.mismatches) - len(ties),
        "differences": [asdict(m) for m in own.mismatches if m not in ties][:SHOWN],
        "hypotheses": {},
    }
    text = _counts(own, ours.bound)
    if own.share(ours.bound) == 1.0:
        if len(ties) <= MAX_TIES * own.drafts:
            return Check("drafts", text), found
        fix = "train the drafter, or compare in float32 (target.dtype=float32)"
        return Check("drafts", f"{text}: too many to prove anything", "fail", fix), found
    if all(m.theirs == 0 for m in own.mismatches if m not in ties):
        text += "; all of those are 0: vLLM drafts zeros within K + 1 tokens of its limit"
        fix = "raise serve.max_model_len (and the positions of target and drafter) or send less"
        return Check("drafts", text, "fail", fix), found
    differing = [t for t in traces if t.name in {m.trace for m in own.mismatches}]
    cause, ranking = explain(ours.table, ours.drafter, *ours.borrowed, differing, ours.bound)
    found["hypotheses"] = {h.name: share for h, share in ranking}
    if cause is not None:
        text += f"; '{cause.name}' gives vLLM's again: {cause.cause}"
        return Check("drafts", text, "fail", cause.remedy), found
    best, share = ranking[0]
    fix = (
        f"none of {len(ranking)} known faults gives them again (nearest: '{best.name}', "
        f"{share:.0%}): the engine may hold other weights than the folder (a stale copy, "
        "quantisation), or have a fault of its own; do not serve it"
    )
    return Check("drafts", text, "fail", fix), found


def check_cache(ours: Ours, warm: Sequence[Trace], hits: float) -> Check:
    """Drafts after a cached prefix are ours too."""
    if not hits:
        return Check("prefix cache", "off, or the probe did not reach it", "skip")
    own = compare(AS_CONFIGURED, ours.drafter, *ours.borrowed, warm)
    text = f"{hits:.0f} cached tokens; {_counts(own, ours.bound)}"
    if own.share(ours.bound) == 1.0:
        return Check("prefix cache", text)
    fix = (
        "without the cache they are ours: the drafter's keys of cached tokens are missing or "
        "stale; serve with --no-enable-prefix-caching (serve.args), reset the cache after a swap"
    )
    return Check("prefix cache", text, "fail", fix)


def _counts(agreement: Agreement, bound: float) -> str:
    ties = agreement.near_ties(bound)
    wrong = len(agreement.mismatches) - len(ties)
    return f"{agreement.drafts} drafts: {len(ties)} near ties, {wrong} differ from ours"


def check_tau(ours: Ours, served: Served) -> tuple[Check, dict[str, Any]]:
    """Served tau is replayed tau, on the harvested features, over answers with the same text."""
    same = [
        i
        for i, (row, answer) in enumerate(zip(ours.rows, served.answers, strict=True))
        if list(row["output_ids"]) == answer.output_ids
    ]
    text = f"{len(same)} of {len(ours.rows)} answers are the recorded ones"
    if 2 * len(same) < len(ours.rows):
        fix = "the engine does not answer as in the traffic: see 'served target'"
        return Check("tau", text, "fail", fix), {}
    rows = [ours.rows[i] for i in same]
    walks = replay(ours.drafter, *ours.borrowed, [ours.recorded[i] for i in same], ours.k)
    counts = [rounds(served.answers[i])[0] for i in same]
    replayed, real = table(rows, walks, ours.k), table(rows, counts, ours.k)
    measured = {"tau_replay": replayed, "tau_served": real, "rounds": num_rounds(counts)}
    off = max(abs(a - b) for a, b in zip(replayed["positions"], real["positions"], strict=True))
    text = (
        f"replayed {replayed['pooled']:.3f}, served {real['pooled']:.3f} ({num_rounds(counts)} "
        f"rounds, largest difference at a position {100 * off:.1f} points); {text}"
    )
    if abs(real["pooled"] / replayed["pooled"] - 1) <= POOLED and off <= POSITION:
        return Check("tau", text), measured
    fix = "the rows above name the cause; if all of them are fine, replay other samples"
    return Check("tau", text, "fail", fix), measured
