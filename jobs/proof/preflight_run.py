"""Try the drafter on the engine that will serve it, on held-out prompts, token by token.

Every check compares what a real vLLM server did with our own forward on the same tokens. Where they
differ, dflash.diagnose tries the known faults and names the one that reproduces vLLM's drafts.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dflash.agreement import TIES
from dflash.checkpoint import load_drafter, read_config
from dflash.diagnose import Answer, Trace, draft_logits, own_noise, read_answer
from dflash.hypotheses import hypotheses
from dflash.target_model import load_target
from jobs.base.checks import Check
from jobs.base.config import Config
from jobs.base.devices import compute_device, compute_dtype, require_fit
from jobs.base.target_facts import target_config
from jobs.dataset.samples import rows_with_rounds, with_features
from jobs.proof.engine_checks import (
    Ours,
    Row,
    Served,
    check_cache,
    check_drafts,
    check_features,
    check_fit,
    check_tau,
    check_text,
    has_drafts,
)
from jobs.proof.greedy_requests import PLAIN, as_request, longest, servable
from jobs.proof.reference_check import too_large
from jobs.proof.template_check import ask_endings, check_template
from jobs.servers.configured import server
from jobs.servers.server_pool import require
from serving.client import Completion, Request, complete, counter
from serving.drafts import Recorded, drafted, read_drafts
from serving.start_checks import check_drafter
from serving.vllm_counts import rounds
from serving.vllm_server import vllm_runs_on_cpu

PROBE_PROMPT, PROBE_TOKENS = 512, 32
"""Tokens of the prompt that is sent twice, and of its answer. The prompt spans several cache
blocks; vLLM computes the last one again."""
SPECIAL_TOKENS = 32
"""Most special tokens that are tried as mask token, the highest ids."""


def try_on_engine(cfg: Config, folder: Path) -> tuple[list[Check], dict[str, Any]]:
    """The checks, and the numbers behind them. Starts one vLLM server.

    The server has stopped before our models are loaded: a GPU may hold only one of the two. Raises
    ValueError without held-out samples or memory. A server that does not start is a failed check.
    """
    rows = held_out(cfg, folder)
    k = max(check_drafter(folder, cfg.target_path, cfg.serve.k, cfg.serve.max_model_len))
    require(cfg, folder, 1, "preflight")
    require_fit(cfg, "preflight")
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
    ours = with_noise(cfg, folder, ours, cold)
    row, found = check_drafts(ours, cold)
    checks.append(row)
    if row.status == "ok":
        checks.append(check_cache(ours, [warm], served.hits))
    checks.append(tau_check)
    return [*checks, *nothing_compared(checks)], measured | found


def nothing_compared(checks: Sequence[Check]) -> list[Check]:
    """A failed check if neither drafts nor rounds of the engine could be compared, else []."""
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
    """What was drafted for each answer, with its name. A last round without room for a draft is
    left out.
    """
    found = []
    for name, one, answer in zip(names, completions, answers, strict=True):
        drafts = drafted(one, recorded)
        found.append(Trace(name, answer, rounds(one)[0][: len(drafts)], torch.tensor(drafts)))
    return found


def held_out(cfg: Config, folder: Path) -> list[Row]:
    """The first `preflight.requests` held-out rows that the server has room for. Rows are in the
    order of a hash, so these are a random choice.
    """
    shape = read_config(folder)
    rows = rows_with_rounds(cfg, shape.target_layer_ids)
    rows = servable(cfg, rows, max(cfg.serve.k or [shape.num_drafts]))
    return rows[: cfg.preflight.requests]


def prepare(cfg: Config, folder: Path, rows: list[Row]) -> Ours:
    """Load both models, and compute the features of the recorded answers anew."""
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


def with_noise(cfg: Config, folder: Path, ours: Ours, traces: Sequence[Trace]) -> Ours:
    """`ours` with `noise` measured: our drafts compared with those of a float32 forward on the same
    text. Unchanged if we compute in float32 anyway, if no draft was recorded, or if the target does
    not fit into memory in float32.

    It has to be measured: rounding inside the drafter changes more drafts than near ties of the
    final logits explain. A tiny drafter in bfloat16 changes 4 %, some far beyond a near tie.
    """
    if ours.target.dtype == torch.float32 or not has_drafts(traces) or too_large(cfg):
        return ours
    device = compute_device(cfg)
    target = load_target(cfg.target_path, torch.float32, device)
    drafter = load_drafter(folder).to(device)

    def precise(trace: Trace) -> Tensor:
        ids, start = trace.answer.ids.tolist(), trace.answer.num_prompt
        answer = read_answer(target, drafter.cfg, ids[:start], ids[start:], shifts=(0,))
        request, anchors = answer.request(drafter.cfg.target_layer_ids), torch.tensor(trace.anchors)
        models = (drafter, target.embedding, target.head)
        return draft_logits(*models, request, anchors, trace.drafts.shape[1]).argmax(-1)

    return replace(ours, noise=own_noise(ours.drafter, *ours.borrowed, traces, precise))


def _thetas(cfg: Config) -> list[float]:
    """RoPE bases to try: the target's own, and the defaults of Transformers and vLLM."""
    target = target_config(cfg)
    own = (target.get("rope_parameters") or target).get("rope_theta", 1e4)
    return [float(own), 1e4, 1e6]


def _special_tokens(cfg: Config) -> list[int]:
    from transformers import AutoTokenizer  # as in dflash/target_model.py

    tokenizer = AutoTokenizer.from_pretrained(cfg.target_path, local_files_only=True)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return sorted(special | set(tokenizer.all_special_ids), reverse=True)[:SPECIAL_TOKENS]


def serve(cfg: Config, folder: Path, rows: Sequence[Row], k: int) -> Served:
    """Start a server with the settings of `serve`, on a free port, and send it the requests. Raises
    ValueError if it fails.

    It drafts one K, the largest, at every batch size, so that its rounds can equal replayed ones.
    """
    settings = {"host": "127.0.0.1", "port": 0, "drafter": str(folder), "k": [k], "capture": ""}
    running = server(cfg.override("serve", **settings), "preflight.log")
    path = cfg.path("server_logs", "preflight.drafts")
    running.drafts = path if vllm_runs_on_cpu() else None
    with running:
        asked = [as_request(row) for row in rows]
        answers = complete(running.url, asked, cfg.preflight.concurrency, "served")
        endings = ask_endings(cfg, running.url)
        before = counter(running.url, "vllm:prefix_cache_hits_total")
        ask = [probe(rows, longest(cfg, k))]
        probes = [*complete(running.url, ask, 1), *complete(running.url, ask, 1)]
        hits = counter(running.url, "vllm:prefix_cache_hits_total") - before
    recorded = None if running.drafts is None else read_drafts(path)
    return Served(answers, probes, hits, endings, recorded)


def probe(rows: Sequence[Row], limit: int) -> Request:
    """A prompt of several cache blocks: held-out samples joined end to end, without the first
    token. So it begins unlike the samples, and the first of the two requests finds nothing in the
    cache. With its answer it has at most `limit` tokens.
    """
    ids = [token for row in rows for token in [*row["prompt_ids"], *row["output_ids"]]]
    size = min(PROBE_PROMPT, limit - PROBE_TOKENS)
    return Request(
        prompt=(ids * (1 + size // len(ids)))[1 : size + 1],
        max_tokens=PROBE_TOKENS,
        extra={**PLAIN, "ignore_eos": True},
    )


def answer_of(ours: Ours, completion: Completion) -> Answer:
    """The served answer with our target's features. If it equals a recorded answer, those are
    computed already.
    """
    ids = torch.tensor([*completion.prompt_ids, *completion.output_ids])
    for answer in ours.answers:
        if answer.num_prompt == len(completion.prompt_ids) and torch.equal(answer.ids, ids):
            return answer
    return read_answer(ours.target, ours.drafter.cfg, completion.prompt_ids, completion.output_ids)
