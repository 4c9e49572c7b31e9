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

from dflash.agreement import TIES
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
from dflash.replay import Request as Sample
from dflash.target import Target, load_target
from jobs.comparison import FAR, MAX_WRONG, table
from jobs.comparison import compare as compare_served
from jobs.config import Config
from jobs.doctor import Check
from jobs.endings import Endings, ask_endings, check_template
from jobs.measure import PLAIN, as_request
from jobs.samples import load_rows, set_aside, with_features
from jobs.serve import server
from jobs.servers import require
from jobs.shape import compute_device, compute_dtype, none_of_target, target_config
from serving.acceptance import rounds
from serving.checks import check_drafter
from serving.client import Completion, Request, complete, counter
from serving.drafts import Recorded, drafted, read_drafts
from serving.server import vllm_runs_on_cpu

MAX_TIES = {torch.float32: 0.02, torch.bfloat16: 0.06, torch.float16: 0.02}
"""Share of drafts that may differ at near ties: a drafter that is never sure cannot be compared."""
FEATURE_ERROR = 0.05
"""Relative error per token, median: bfloat16 storage alone gives 0.002."""
PROBE_PROMPT, PROBE_TOKENS = 512, 32
"""Tokens of the prompt that is sent twice: several cache blocks, of which vLLM redoes the last."""
SPECIAL_TOKENS, SHOWN = 32, 20

Row = dict[str, Any]


@dataclass(frozen=True)
class Ours:
    """Our side: models in our compute dtype, held-out rows, their harvested and fresh features."""

    target: Target
    drafter: Drafter
    rows: list[Row]
    recorded: list[Sample]
    answers: list[Answer]
    table: list[Hypothesis]
    k: int
    ties: float  # relative logit gap of a near tie in this dtype

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
    drafts: Recorded | None  # None: this engine's drafts are not recorded


def trial(cfg: Config, folder: Path) -> tuple[list[Check], dict[str, Any]]:
    """Rows of the table, and the numbers behind them. Starts one vLLM server.

    The server comes first and is gone before our models are loaded: a GPU holds one of them.
    Raises ValueError without held-out samples, or memory; a server that does not start is a row.
    """
    rows = held_out(cfg)
    k = max(check_drafter(folder, cfg.target_path, cfg.serve.k, cfg.serve.max_model_len))
    require(cfg, folder, 1, "preflight")
    served, error = None, ""
    try:
        served = serve(cfg, folder, rows, k)
    except ValueError as problem:
        error = str(problem)
    ours = prepare(cfg, folder, rows)
    checks = [check_features(ours), check_fit(ours)]
    if served is None:
        fix = "the message is the server's own; `flywheel doctor` checks the machine"
        return [*checks, Check("server", error, "fail", fix)], {}
    answers = [answer_of(ours, completion) for completion in served.answers + served.probes]
    checks += [check_text(answers, ours.ties), check_template(cfg, served.endings)]
    tau_check, measured = check_tau(ours, served, answers)
    if served.drafts is None:
        fix = "our worker records drafts on CPUs only; tau below still compares the counts"
        checks += [Check("drafts", "not recorded", "skip", fix), tau_check]
        return [*checks, *nothing_compared(checks)], measured
    names = [*(row["sample_id"] for row in ours.rows), "probe", "probe, cached"]
    *cold, warm = traces(names, served.answers + served.probes, answers, served.drafts)
    row, found = check_drafts(ours, cold)
    checks.append(row)
    if row.status == "ok":
        checks.append(check_cache(ours, [warm], served.hits))
    checks.append(tau_check)
    return [*checks, *nothing_compared(checks)], measured | found


def nothing_compared(checks: Sequence[Check]) -> list[Check]:
    """A row that fails where neither drafts nor rounds of the engine could be compared."""
    if any(c.name in ("drafts", "tau") and c.status != "skip" for c in checks):
        return []
    fix = "preflight longer answers: hold out other conversations, or raise preflight.requests"
    return [Check("engine", "not one of its drafts or rounds was compared", "fail", fix)]


def traces(
    names: Sequence[str],
    completions: Sequence[Completion],
    answers: Sequence[Answer],
    recorded: Recorded,
) -> list[Trace]:
    """What was drafted for each answer, named."""
    return [
        Trace(name, answer, rounds(one)[0], torch.tensor(drafted(one, recorded)))
        for name, one, answer in zip(names, completions, answers, strict=True)
    ]


def held_out(cfg: Config) -> list[Row]:
    """The first `preflight.requests` greedy rows with a round. Raises ValueError without any."""
    left_out = set_aside(cfg)
    rows = [
        row
        for row in load_rows(cfg, cfg.evaluate.split)
        if len(row["output_ids"]) > 1 and row["sample_id"] not in left_out
    ]
    if not rows:
        fix = "ingest more conversations or set evaluate.split"
        raise none_of_target(cfg, f"greedy {cfg.evaluate.split} sample", fix)
    return rows[: cfg.preflight.requests]  # in order of a hash: as good as drawn


def prepare(cfg: Config, folder: Path, rows: list[Row]) -> Ours:
    """Load both models and read the recorded answers once more."""
    dtype, device = compute_dtype(cfg), compute_device(cfg)
    target = load_target(cfg.target_path, dtype, device)
    drafter = load_drafter(folder, dtype).to(device)
    return Ours(
        target=target,
        drafter=drafter,
        rows=rows,
        recorded=with_features(cfg, rows, drafter.cfg.target_layer_ids),
        answers=[
            read_answer(target, drafter.cfg, row["prompt_ids"], row["output_ids"]) for row in rows
        ],
        k=max(check_drafter(folder, cfg.target_path, cfg.serve.k, cfg.serve.max_model_len)),
        table=hypotheses(drafter.cfg, _thetas(cfg), _special_tokens(cfg)),
        ties=TIES[dtype],
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
        extra={**PLAIN, "ignore_eos": True},
    )


def answer_of(ours: Ours, completion: Completion) -> Answer:
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
    first = [len(a.ids) - 1 - ours.k - a.num_prompt for a in ours.answers]
    if max(first) < 0:
        return Check("fit", "not checked: every answer is shorter than a block", "skip")
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


def check_text(answers: Sequence[Answer], ties: float) -> Check:
    """Every served token is the argmax of our target, up to near ties."""
    gaps = torch.cat([answer.gaps for answer in answers])
    near, wrong = int(((gaps > 0) & (gaps < ties)).sum()), int((gaps >= ties).sum())
    largest = float(gaps.max())
    text = (
        f"{len(gaps)} served tokens: {near} near ties, {wrong} are not the target's argmax "
        f"(largest gap {largest:.2%} of a logit, near ties are below {ties:.2%})"
    )
    if wrong <= MAX_WRONG * len(gaps) and largest < FAR * ties:
        return Check("served target", text)
    fix = (
        "the engine serves another target, dtype or quantisation than target.path and target.dtype "
        "say; compare serve.args"
    )
    return Check("served target", text, "fail", fix)


def check_drafts(ours: Ours, traces: Sequence[Trace]) -> tuple[Check, dict[str, Any]]:
    """VLLM's drafts are ours, token by token; otherwise which fault makes them so."""
    own = compare(AS_CONFIGURED, ours.drafter, *ours.borrowed, traces)
    ties = own.near_ties(ours.ties)
    found = {
        "drafts": own.drafts,
        "near_ties": [asdict(m) for m in ties],
        "different": len(own.mismatches) - len(ties),
        "differences": [asdict(m) for m in own.mismatches if m not in ties][:SHOWN],
        "hypotheses": {},
    }
    text = _counts(own, ours.ties)
    if same(own, ours.ties):
        if len(own.mismatches) <= MAX_TIES[ours.target.dtype] * own.drafts:
            return Check("drafts", text), found
        fix = "train the drafter, or compare in float32 (target.dtype=float32)"
        return Check("drafts", f"{text}: too many to prove anything", "fail", fix), found
    if all(m.theirs == 0 for m in own.mismatches if m not in ties):
        text += "; all of those are 0: vLLM drafts zeros within K + 1 tokens of its limit"
        fix = "raise serve.max_model_len (and the positions of target and drafter) or send less"
        return Check("drafts", text, "fail", fix), found
    differing = [t for t in traces if t.name in {m.trace for m in own.mismatches}]
    cause, ranking = explain(ours.table, ours.drafter, *ours.borrowed, differing, ours.ties)
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
    text = f"{hits:.0f} cached tokens; {_counts(own, ours.ties)}"
    if same(own, ours.ties):
        return Check("prefix cache", text)
    fix = (
        "without the cache they are ours: the drafter's keys of cached tokens are missing or "
        "stale; serve with --no-enable-prefix-caching (serve.args), reset the cache after a swap"
    )
    return Check("prefix cache", text, "fail", fix)


def same(found: Agreement, ties: float) -> bool:
    """Whether rounding explains every draft that differs: near ties, and the tail behind them."""
    far = len(found.mismatches) - len(found.near_ties(FAR * ties))
    return far == 0 and found.share(ties) >= 1 - MAX_WRONG


def _counts(agreement: Agreement, ties: float) -> str:
    near = agreement.near_ties(ties)
    wrong = len(agreement.mismatches) - len(near)
    return f"{agreement.drafts} drafts: {len(near)} near ties, {wrong} differ from ours"


def check_tau(
    ours: Ours, served: Served, answers: Sequence[Answer]
) -> tuple[Check, dict[str, Any]]:
    """Served rounds are replayed rounds, on the text that was served, whatever it is."""
    names = [row["sample_id"] for row in ours.rows]
    read = {one.request_id: answer for one, answer in zip(served.answers, answers, strict=False)}
    named = list(zip(names, served.answers, strict=True))
    found = compare_served(
        ours.target, ours.drafter, named, ours.k, lambda one: read[one.request_id]
    )
    if not found.whole:
        text = "not checked: no served answer holds a whole block, so every round is cut at its end"
        return Check("tau", text, "skip", "hold out longer answers"), {}
    of = dict(zip(names, ours.rows, strict=True))
    rows = [of[name] for name in found.names]
    measured = {
        "tau_replay": table(rows, found.replayed, ours.k),
        "tau_served": table(rows, found.served, ours.k),
        "rounds": found.rounds,
        "comparison": found.summary(),
    }
    text = (
        f"replayed {measured['tau_replay']['pooled']:.3f}, served "
        f"{measured['tau_served']['pooled']:.3f} over {found.rounds} rounds; {found.words()}"
    )
    faults = found.faults()
    if not faults:
        return Check("tau", text), measured
    fix = "the rows above name the cause; if all of them are fine, the engine counts otherwise"
    return Check("tau", f"{text}; {'; '.join(faults)}", "fail", fix), measured
