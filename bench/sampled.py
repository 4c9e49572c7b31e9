"""make bench-sampled [ARGS="work=runs/mine"]: estimators of tau at temperature > 0, and their bias.

Needs a finished demo (make demo). The reference decoder answers held-out prompts, with greedy and
with probabilistic drafts. bench.sampled_rounds estimates the rounds from the text alone; its
estimates are compared with the decoded rounds. `ratio` is expected / decoded tau with probabilistic
drafts. `detail` has the bias of every estimator, with a standard error over prompts.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from bench.harness import report
from bench.sampled_rounds import Chances, anchor_chances, chances, expected
from dflash.checkpoint import load_drafter
from dflash.decode import decode
from dflash.model import Drafter
from dflash.replay import Request
from dflash.sampling import Sampling
from dflash.target_model import Target, load_target
from jobs.base.config import load
from jobs.base.target_facts import end_tokens
from jobs.dataset.samples import load_requests
from jobs.evaluation.drafters import find_drafter
from jobs.evaluation.intervals import Resamples, Term

PROMPTS, DRAWS, TOKENS = 16, 2, 48
SAMPLING = Sampling(temperature=0.8, top_p=0.95)
KINDS = {"greedy drafts": False, "probabilistic drafts": True}


@dataclass(frozen=True)
class Answer:
    """A sampled answer: the number of its prompt, its decoded rounds, chances by kind of drafts."""

    prompt: int
    accepted: list[int]
    known: dict[str, Chances]


def main() -> None:
    """Compare and print the JSON line."""
    cfg = load(None, sys.argv[1:])
    prompts = [row["prompt_ids"] for row in load_requests(cfg, "test")[0][:PROMPTS]]
    target = load_target(cfg.target_path, torch.float32)
    drafter = load_drafter(find_drafter(cfg, ""))
    answers = {
        kind: sample(target, drafter, prompts, end_tokens(cfg), kind, offset)
        for offset, kind in enumerate(KINDS)
    }
    found = {kind: measure(kind, answers) for kind in KINDS}
    settings = {"prompts": len(prompts), "draws": DRAWS, "tokens": TOKENS}
    settings |= {"temperature": SAMPLING.temperature, "top_p": SAMPLING.top_p}
    last = found["probabilistic drafts"]
    ratio = 1 + last["expected from the text"]["bias"] / last["decoded"]
    report("sampled", [ratio], "expected tau / decoded tau", settings | found)


def sample(
    target: Target, drafter: Drafter, prompts: list, ends: list[int], kind: str, offset: int
) -> list[Answer]:
    """DRAWS answers to each prompt, decoded with this kind of drafts."""
    found, k = [], drafter.cfg.num_drafts
    for number in tqdm(range(len(prompts) * DRAWS), desc=kind):
        prompt, seed = prompts[number % len(prompts)], number + offset * 1_000_000
        real = decode(target, prompt, TOKENS, ends, drafter, k, SAMPLING, KINDS[kind], seed)
        ids = [*prompt, *real.output_ids]
        seen = target.features([ids], drafter.cfg.target_layer_ids)[0]
        request = Request(torch.tensor(ids), len(prompt), seen.taps)
        known = {
            name: chances(
                drafter,
                target.embedding,
                target.head,
                request,
                seen.last,
                SAMPLING,
                k,
                probabilistic,
            )
            for name, probabilistic in KINDS.items()
        }
        found.append(Answer(number % len(prompts), real.accepted, known))
    return found


def measure(kind: str, answers: dict[str, list[Answer]]) -> dict[str, Any]:
    """Decoded tau with this kind of drafts, and the bias of each estimator of it."""
    mine = answers[kind]
    others = next(found for name, found in answers.items() if name != kind)
    draws = Resamples([str(answer.prompt) for answer in mine], 200)

    limits = (1.0, 1.0 + max(max(answer.accepted, default=0) for answer in mine))

    def term(sign: float, pairs: Sequence[tuple[float, float]]) -> Term:
        tokens, rounds = zip(*pairs, strict=True)
        return sign, draws.sums(tokens), draws.sums(rounds)

    def estimate(texts: list[Answer], chance: str, everywhere: bool) -> list[tuple[float, float]]:
        pairs = []
        for answer in texts:
            known = answer.known[kind]
            anchors = anchor_chances(known.given_text)
            weights = torch.ones_like(anchors) if everywhere else anchors
            one = expected(getattr(known, chance), weights)
            pairs.append((one.rounds + float(one.accepted.sum()), one.rounds))
        return pairs

    walked = [(sum(a.accepted) + len(a.accepted), len(a.accepted)) for a in mine]
    estimators = {
        "expected from the text": estimate(mine, "given_text", False),
        "expected from other answers": estimate(others, "given_text", False),
        "rule's cumprod at the anchors": estimate(mine, "by_rule", False),
        "rule's cumprod at every token": estimate(mine, "by_rule", True),
    }
    found: dict[str, Any] = {
        "decoded": round(draws.estimate(term(1.0, walked), limits=limits).value, 4)
    }
    for name, pairs in estimators.items():
        bias = draws.estimate(term(1.0, pairs), term(-1.0, walked), limits=limits)
        found[name] = {"bias": round(bias.value, 4), "error": round(bias.error or 0.0, 4)}
    return found


if __name__ == "__main__":
    main()
