"""The checks of a trial: the engine's answers, rounds and drafts compared with our own."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dflash.diagnose import Agreement, Answer, Trace, compare, explain, fits_better, in_a_row
from dflash.hypotheses import AS_CONFIGURED, Hypothesis
from dflash.model import Drafter
from dflash.replay import Replayable
from dflash.target_model import Target
from jobs.base.checks import Check
from jobs.proof.round_comparison import FAR, MAX_WRONG, table
from jobs.proof.round_comparison import compare as compare_served
from jobs.proof.template_check import Endings
from serving.client import Completion
from serving.drafts import Recorded

MAX_TIES, TWICE = 0.02, 2.0
"""MAX_TIES: share of drafts that may differ from ours, near ties included. With more, a drafter is
too unsure to prove anything. In addition TWICE as many may differ as our own rounding changes,
since the engine rounds, too."""
FEATURE_ERROR = 0.05
"""Largest allowed relative error per token (median). bfloat16 storage alone gives 0.002."""
SHOWN = 20

Row = dict[str, Any]


NO_NOISE = Agreement(1, [])


@dataclass(frozen=True)
class Ours:
    """Our side: models in our compute dtype, held-out rows, their harvested features (`recorded`)
    and freshly computed ones (`answers`).
    """

    target: Target
    drafter: Drafter
    rows: list[Row]
    recorded: Sequence[Replayable]
    answers: list[Answer]
    table: list[Hypothesis]
    k: int
    ties: float  # relative logit gap of a near tie in this dtype
    noise: Agreement = NO_NOISE  # drafts that our own rounding changes; NO_NOISE: not measured

    @property
    def borrowed(self) -> tuple[Tensor, Tensor]:
        """The target's embedding and head."""
        return self.target.embedding, self.target.head


@dataclass(frozen=True)
class Served:
    """What the server answered. `probes`: one prompt sent twice; `hits`: its cached tokens."""

    answers: list[Completion]
    probes: list[Completion]
    hits: float
    endings: Endings | None
    drafts: Recorded | None  # None: this engine's drafts are not recorded


def check_features(ours: Ours) -> Check:
    """Check that the harvested features are those of this target at these layers."""
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
    """Check that no other reading of config.json (dflash/hypotheses.py) gives more right drafts."""
    first = [len(a.ids) - 1 - ours.k - a.num_prompt for a in ours.answers]
    if max(first) < 0:
        return Check("fit", "not checked: every answer is shorter than a block", "skip")
    better = fits_better(ours.table, ours.drafter, *ours.borrowed, ours.answers, ours.k)
    own = in_a_row(AS_CONFIGURED, ours.drafter, *ours.borrowed, ours.answers, ours.k)
    if not better and not own.any():
        return Check("fit", "not checked: no draft is right under any reading", "skip")
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
    """Check that every served token is the argmax of our target, near ties aside. `ties`: gap of a
    near tie, relative to the largest logit.
    """
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
    """Check that vLLM's drafts equal ours, token by token; if not, name the fault that does it."""
    if not has_drafts(traces):
        text = "not checked: no served answer has a second token, so there is no draft to compare"
        return Check("drafts", text, "skip", "hold out longer answers"), {}
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
    if same(own, ours.ties, ours.noise):
        if within(
            len(own.mismatches), own.drafts, MAX_TIES, len(ours.noise.mismatches), ours.noise
        ):
            return Check("drafts", text), found
        fix = "train the drafter, or compare in float32 (target.dtype=float32)"
        return Check("drafts", f"{text}: too many to prove anything", "fail", fix), found
    if all(m.theirs == 0 for m in own.mismatches if m not in ties):
        text += "; all of those are 0: vLLM drafts zeros within K + 1 tokens of its limit"
        fix = "raise serve.max_model_len (and the positions of target and drafter) or send less"
        return Check("drafts", text, "fail", fix), found
    differing = [t for t in traces if t.name in {m.trace for m in own.mismatches}]
    unsure = TWICE * ours.noise.beyond(ours.ties) / ours.noise.drafts
    cause, ranking = explain(ours.table, ours.drafter, *ours.borrowed, differing, ours.ties, unsure)
    found["hypotheses"] = {h.name: share for h, share in ranking}
    if cause is not None:
        text += f"; '{cause.name}' reproduces vLLM's drafts: {cause.cause}"
        return Check("drafts", text, "fail", cause.remedy), found
    best, share = ranking[0]
    fix = (
        f"none of {len(ranking)} known faults reproduces them (nearest: '{best.name}', "
        f"{share:.0%}): the engine may hold other weights than the folder (a stale copy, "
        "quantisation), or have a fault of its own; do not serve it"
    )
    return Check("drafts", text, "fail", fix), found


def has_drafts(traces: Sequence[Trace]) -> bool:
    """Whether there is a draft to compare."""
    return any(trace.drafts.numel() for trace in traces)


def check_cache(ours: Ours, warm: Sequence[Trace], hits: float) -> Check:
    """Check that vLLM's drafts after a cached prefix equal ours, too."""
    if not hits:
        return Check("prefix cache", "off, or the probe did not reach it", "skip")
    if not has_drafts(warm):
        return Check("prefix cache", "not checked: nothing was drafted behind it", "skip")
    own = compare(AS_CONFIGURED, ours.drafter, *ours.borrowed, warm)
    text = f"{hits:.0f} cached tokens; {_counts(own, ours.ties)}"
    if same(own, ours.ties, ours.noise):
        return Check("prefix cache", text)
    fix = (
        "without the cache they are ours: the drafter's keys of cached tokens are missing or "
        "stale; serve with --no-enable-prefix-caching (serve.args), reset the cache after a swap"
    )
    return Check("prefix cache", text, "fail", fix)


def same(found: Agreement, ties: float, noise: Agreement = NO_NOISE) -> bool:
    """Whether rounding explains all drafts that differ. Of the drafts, MAX_WRONG may differ beyond
    a near tie, and none beyond FAR near ties. `within` adds what our own rounding changes.
    """
    return within(
        found.beyond(ties), found.drafts, MAX_WRONG, noise.beyond(ties), noise
    ) and within(found.beyond(FAR * ties), found.drafts, 0.0, noise.beyond(FAR * ties), noise)


def within(count: int, drafts: int, share: float, own: int, noise: Agreement) -> bool:
    """Whether `count` of `drafts` is at most this share, plus TWICE our own count `own`, plus three
    standard deviations of the latter. `own` was counted among `noise.drafts` and is scaled. If
    noise was measured, the deviation is at least that of a count of one.
    """
    own_here = own * drafts / noise.drafts
    deviation = max(own_here, float(noise is not NO_NOISE)) ** 0.5
    return count <= share * drafts + TWICE * own_here + 3 * deviation


def _counts(agreement: Agreement, ties: float) -> str:
    near = agreement.near_ties(ties)
    wrong = len(agreement.mismatches) - len(near)
    return f"{agreement.drafts} drafts: {len(near)} near ties, {wrong} differ from ours"


def check_tau(
    ours: Ours, served: Served, answers: Sequence[Answer]
) -> tuple[Check, dict[str, Any]]:
    """Check that served rounds equal replayed ones, on the text that was served. Also returns the
    numbers behind it; {} if no round was compared.
    """
    names = [row["sample_id"] for row in ours.rows]
    read = {one.request_id: answer for one, answer in zip(served.answers, answers, strict=False)}
    named = list(zip(names, served.answers, strict=True))
    found = compare_served(
        ours.target, ours.drafter, named, ours.k, lambda one: read[one.request_id]
    )
    if found.unchecked:
        return Check(
            "tau", f"not checked: {found.unchecked}", "skip", "hold out longer answers"
        ), {}
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
    fix = "the rows above name the cause; if all of them are ok, the engine counts in another way"
    return Check("tau", f"{text}; {'; '.join(faults)}", "fail", fix), measured
