"""flywheel evaluate [FOLDER] [evaluate.baseline=FOLDER] [evaluate.regression=humaneval,FILE]

Replay a drafter (and a baseline) on held-out conversations, greedy and sampled, and on regression
sets. Writes one row per request and K to acceptance/, a report page, and
<work>/evaluations/<drafter>.json with tau, intervals, slices and the comparison.
"""

from typing import Any

from dflash.acceptance import tau
from dflash.checkpoint import compat_fields, compat_key, drafter_sha256
from dflash.identity import target_id
from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.dataset.acceptance_rows import commit_walks
from jobs.dataset.samples import at_one_selection
from jobs.dataset.slices import domains, pick
from jobs.evaluation.drafters import (
    Side,
    baseline_side,
    check_shape,
    drafter_on,
    features_of,
    find_drafter,
    held_out,
    load_on,
)
from jobs.evaluation.evaluation_table import show
from jobs.evaluation.regression_sets import regression
from jobs.evaluation.replay_walks import draftable, leaks, replay_all
from jobs.evaluation.summaries import by_k, compare
from jobs.reporting.page import publish
from store.place import write_json


def run(cfg: Config) -> dict[str, Any]:
    """Evaluate `evaluate.drafter` (default: the newest) at every K; returns the summary.

    Each side is replayed on features of the target layers (taps) that it reads itself. Raises
    ValueError without held-out samples, for a drafter of another target, and for features that were
    not harvested.
    """
    cfg = at_one_selection(cfg)
    folder = find_drafter(cfg, cfg.evaluate.drafter)
    identity = target_id(cfg.target_path)
    check_shape(cfg, folder)
    borrowed = load_on(cfg)
    ours = Side(folder=folder, drafter=drafter_on(folder, borrowed))
    theirs = baseline_side(cfg, folder, borrowed)
    sides = [ours] if theirs is None else [ours, theirs]
    rows = held_out(cfg, sides)
    found, requests, taps = [], [], ()
    for side in sides:
        if side.taps != taps:
            requests.clear()  # frees these features before the next ones are loaded
            requests, taps = features_of(cfg, side, rows), side.taps
        found.append(replay_all(side.drafter, borrowed, requests))
        commit_walks(cfg, identity, side.folder, side.drafter, rows, found[-1])
    walks = found[0]
    evaluation = {
        "drafter": folder.name,
        "drafter_sha256": drafter_sha256(folder),
        "target_id": identity,
        "compat_key": compat_key(ours.drafter.cfg, identity),
        "compat": compat_fields(ours.drafter.cfg, identity),
        "split": cfg.evaluate.split,
        "leaking": leaks(cfg, rows, sides),
        "k": ours.k,
        "draftable": draftable(ours.drafter, borrowed[1], requests),
        **compare(cfg, rows, sides, [w[side.k] for side, w in zip(sides, found, strict=True)]),
        **by_k(walks),
        "tau_by_k_domain": {
            name: {k: tau(pick(rows, walks[k], name)) for k in sorted(walks)}
            for name in domains(rows)
        },
        **regression(cfg, sides, borrowed),
    }
    evaluation = write_json(cfg.place("evaluations"), f"{folder.name}.json", evaluation)
    show(evaluation)
    page = publish(cfg, evaluation["drafter_sha256"])
    return {"stage": "evaluate", "report": page, **evaluation}


if __name__ == "__main__":
    run_as_module("evaluate")
