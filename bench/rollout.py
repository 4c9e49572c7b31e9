"""How often a roll-out decides wrongly when it is looked at all the time, and how soon it decides.

    python -m bench.rollout [repeats=400]

Nothing is served: conversations are drawn with an uneven ease, one to four answers each, K differs
between answers (as by load), and two replicas take turns. After every tenth conversation the same
code as in `flywheel rollout` decides, until it advances or rolls back, at most MOST conversations.
Two slices of unequal size and acceptance. `ratio`: the 5 % that are allowed over the largest share
of wrong decisions; above 1 all errors are within their limit.
"""

import sys
from collections import Counter

import numpy as np

from bench.harness import cpu_name, report
from jobs.base.config import load
from jobs.base.console import console, print_table
from jobs.reconciling.evidence import Answer, Arms
from jobs.reconciling.sequential import positions
from jobs.reconciling.three_answers import judge

K, MOST, EVERY = 7, 3000, 10
SLICES = {"chat": (0.7, 0.55), "code": (0.3, 0.75)}
"""Share of the conversations, and mean chance of a draft."""
Losses = dict[str, float]


def chance_for(tau: float, k: int = K) -> float:
    """The chance of every draft that gives this tau at k drafts."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(k + 1)) < tau else (low, middle)
    return low


class World:
    """Conversations of two replicas; the canary's drafter loses a share of tau by slice."""

    def __init__(self, seed: int, losses: Losses):
        self.rng = np.random.default_rng(seed)
        self.losses = losses

    def conversation(self, number: int) -> tuple[str, list[Answer]]:
        """(side, answers) of the next conversation."""
        rng = self.rng
        side = "canary" if number % 2 else "rest"
        name = "chat" if rng.random() < SLICES["chat"][0] else "code"
        mean = SLICES[name][1]
        chance = rng.beta(mean * 12, (1 - mean) * 12)
        if side == "canary" and self.losses.get(name):
            tau = sum(chance**i for i in range(K + 1))
            chance = chance_for(max(1.0, tau * (1 - self.losses[name])))
        answers = []
        for _ in range(rng.integers(1, 5)):
            k = int(rng.choice([2, 4, 7]))
            rounds = int(rng.integers(5, 40))
            missed = rng.random((rounds, k)) > chance
            accepted = np.where(missed.any(1), missed.argmax(1), k).tolist()
            tokens = sum(accepted) + rounds
            answers.append(
                Answer(
                    slice=name,
                    conversation=str(number),
                    rounds=rounds,
                    counts=positions(accepted, [k] * rounds, K),
                    seconds=tokens * rng.gamma(20, 0.002),
                    tokens=tokens,
                    first_token=float(rng.gamma(5, 0.02)),
                )
            )
        return side, answers


def one_rollout(seed: int, losses: Losses, stops: tuple[str, ...]) -> tuple[str, int]:
    """(decision, answers until it); it ends at one of `stops`."""
    cfg = load(None, [])
    world, arms, asked = World(seed, losses), Arms(list(SLICES), K), 0
    for number in range(MOST):
        side, answers = world.conversation(number)
        asked += len(answers)
        for answer in answers:
            arms.add(side, answer)
        if number % EVERY == EVERY - 1:
            verdict = judge(arms, cfg.rollout)
            if verdict.answer in stops:
                return verdict.answer, asked
    return "hold", asked


BOTH = ("advance", "rollback")
WORLDS: dict[str, tuple[Losses, str]] = {
    "equal": ({}, "rollback"),
    "equal, looked at to the end": ({}, "rollback"),
    "gains 10 %": ({"chat": -0.1, "code": -0.1}, "rollback"),
    "loses 2 % (within tolerance)": ({"chat": 0.02, "code": 0.02}, ""),
    "loses 10 %": ({"chat": 0.1, "code": 0.1}, "advance"),
    "loses 20 %": ({"chat": 0.2, "code": 0.2}, "advance"),
    "loses 20 % in code": ({"code": 0.2}, "advance"),
    "accepts nothing": ({"chat": 1.0, "code": 1.0}, "advance"),
}


def main(repeats: int) -> None:
    """Print the table and the JSON line."""
    rows, worst = [], 0.0
    for name, (losses, wrong) in WORLDS.items():
        stops = BOTH if "to the end" not in name else ("rollback",)
        count = repeats if wrong else repeats // 4
        found = [one_rollout(seed, losses, stops) for seed in range(count)]
        answers = Counter(answer for answer, _ in found)
        decided = [asked for answer, asked in found if answer != "hold"]
        worst = max(worst, answers[wrong] / count)
        spread = np.percentile(decided, [10, 50, 90]).tolist() if decided else [None] * 3
        shares = [answers[answer] / count for answer in (*BOTH, "hold")]
        rows.append([name, count, *shares, wrong or "-", *spread])
        console.print(f"{name}: {shares}")
    columns = ["drafter", "roll-outs", "advance", "roll back", "hold", "wrong is"]
    columns += ["requests: 10 %", "50 %", "90 %"]
    print_table(f"looked at after every {EVERY} conversations", columns, rows)
    detail = {"worlds": [dict(zip(columns, row, strict=True)) for row in rows]}
    report(
        "rollout",
        [0.05 / max(worst, 1 / repeats)],
        "allowed share of wrong decisions / largest one seen",
        detail | {"cpu": cpu_name()},
    )


if __name__ == "__main__":
    given = dict(word.split("=") for word in sys.argv[1:])
    main(int(given.get("repeats", 400)))
