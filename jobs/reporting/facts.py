"""The numbers of a report: what a work folder has about one evaluated drafter.

Values come from the questions in sql/, which treat replayed, decoded and served rows alike.
Intervals come from jobs/evaluation/intervals.py over the same rows. Slices and the comparison come
from the evaluation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow.compute as pc

from jobs.base.config import Config
from jobs.dataset import queries
from jobs.evaluation.intervals import Resamples
from store.ids import drafter_version
from store.place import Place, newest_json

Row = dict[str, Any]
Interval = list[float] | None
ALL = "(all)"  # the name that sql/ gives to the sum over domains
ORIGINS = ("replay", "decode", "served")


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Greedy rows of one drafter, origin and K: tau and each position with their intervals."""

    version: str
    origin: str
    k: int
    requests: int
    conversations: int
    rounds: int
    tau: float
    weighted: float
    macro: float
    ci: Interval
    positions: list[float]
    positions_ci: list[Interval]
    domains: dict[str, float]
    rounds_by_domain: dict[str, int]


class Facts:
    """All facts, read once when it is created. A drafter version is the first 12 digits of the
    drafter's identity, the hash of every file that an engine reads of it.

    `k` is the number of draft tokens at which `verify` served the drafter, else the largest one
    replayed. `verified` and `preflight` are the newest results for this drafter, or None. `methods`
    is the newest comparison of ways to draft for this target, or None.
    """

    def __init__(self, cfg: Config, drafter_sha256: str) -> None:
        """Raises ValueError for a drafter without an evaluation, and for files that are damaged."""
        self.evaluation = _evaluation(cfg, drafter_sha256)
        self.version = drafter_version(drafter_sha256)
        self.verified = _newest(cfg.place("verified"), drafter_sha256=drafter_sha256)
        self.preflight = _newest(cfg.place("preflight"), drafter_sha256=drafter_sha256)
        self.methods = _newest(cfg.place("methods"), target_id=self.evaluation["target_id"])
        self.k = self.verified["k"] if self.verified else self.evaluation["k"]
        self.baseline = self.evaluation["baseline"]
        self.names = {self.version: self.evaluation["drafter"]}
        self.largest = {self.version: self.evaluation["k"]}  # drafts of a whole block
        if self.baseline:
            other = drafter_version(self.baseline["drafter_sha256"])
            self.names[other] = self.baseline["drafter"]
            self.largest[other] = len(self.baseline["tau"]["positions"])
        self.taus = self._ask(cfg, "tau_by_domain_and_version")
        self.rates = self._ask(cfg, "acceptance_by_position")
        self.endings = self._ask(cfg, "where_rounds_end")
        walks = self._walks(cfg)
        self._measured = {
            (version, origin, k): self._measure(version, origin, k, walks, cfg.evaluate.bootstrap)
            for version in self.names
            for origin in ORIGINS
            for k in {self.k, self.largest[version]}
        }
        self.set_aside = _set_aside(cfg, self.evaluation["target_id"])
        champion = queries.ask(cfg, "select drafter_version from champion").to_pylist()
        self.champion = champion[0]["drafter_version"] if champion else None

    def measured(self, origin: str, k: int, version: str = "") -> Measured | None:
        """Greedy rows of `version` (default: the drafter itself), or None if there are none.

        `k`: `self.k`, or the largest K of that version.
        """
        return self._measured[version or self.version, origin, k]

    def _measure(
        self, version: str, origin: str, k: int, walks: list[Row], resamples: int
    ) -> Measured | None:
        where = {"drafter_version": version, "origin": origin, "k": k, "temperature": 0.0}
        taus = {r["domain"]: r for r in pick(self.taus, **where) if r["rounds"]}
        if ALL not in taus:
            return None
        total, mine = taus[ALL], pick(walks, **where)
        draws = Resamples([r["conversation_id"] for r in mine], resamples)
        accepted = [r["accepted"] for r in mine]
        return Measured(
            version=version,
            origin=origin,
            k=k,
            requests=total["requests"],
            conversations=total["conversations"],
            rounds=total["rounds"],
            tau=total["tau_tokens_per_round"],
            weighted=total["tau_weighted"],
            macro=total["tau_macro"],
            ci=draws.tau(accepted, k).interval,
            positions=[r["accept_rate"] for r in pick(self.rates, **where)],
            positions_ci=[draws.position(accepted, i).interval for i in range(1, k + 1)],
            domains={n: r["tau_tokens_per_round"] for n, r in taus.items() if n != ALL},
            rounds_by_domain={n: r["rounds"] for n, r in taus.items() if n != ALL},
        )

    def tau_by_k(self, version: str) -> dict[int, float]:
        """Replayed tau of greedy requests at every K."""
        where = {"drafter_version": version, "origin": "replay", "domain": ALL, "temperature": 0.0}
        return {r["k"]: r["tau_tokens_per_round"] for r in pick(self.taus, **where) if r["rounds"]}

    def _ask(self, cfg: Config, question: str) -> list[Row]:
        path = queries.find_question(question)
        rows = queries.ask(cfg, path.read_text(), question).to_pylist()
        target = self.evaluation["target_id"]
        return [r for r in rows if r["drafter_version"] in self.names and r["target_id"] == target]

    def _walks(self, cfg: Config) -> list[Row]:
        mine = pc.field("drafter_version").isin(list(self.names))
        mine &= pc.field("target_id") == self.evaluation["target_id"]
        mine &= pc.field("k").isin([self.k, *self.largest.values()])
        mine &= pc.field("log").is_null()  # production is another sample of requests
        columns = ["drafter_version", "origin", "k", "temperature", "conversation_id", "accepted"]
        return cfg.table("acceptance").read(columns, mine).to_pylist()


def evaluated(cfg: Config, drafter_sha256: str) -> bool:
    """Whether there is an evaluation of this drafter."""
    return _newest(cfg.place("evaluations"), drafter_sha256=drafter_sha256) is not None


def newest_evaluated(cfg: Config) -> str:
    """The identity of the drafter evaluated last. Raises ValueError if there is none."""
    place = cfg.place("evaluations")
    for found in newest_json(place, ["drafter_sha256"]):
        return found["drafter_sha256"]
    raise ValueError(f"nothing in {place}: run `flywheel evaluate` first")


def pick(rows: Sequence[Row], **where: Any) -> list[Row]:
    """The rows that have these values."""
    return [row for row in rows if all(row[name] == value for name, value in where.items())]


def _set_aside(cfg: Config, target: str) -> dict[str, int]:
    """{reason: number of samples} that harvest set aside for this target."""
    query = """
        select target_id, reason, count(distinct sample_id) as samples
        from set_aside group by all order by reason
    """
    rows = pick(queries.ask(cfg, query).to_pylist(), target_id=target)
    return {row["reason"]: row["samples"] for row in rows}


def _evaluation(cfg: Config, drafter_sha256: str) -> Row:
    found = _newest(cfg.place("evaluations"), drafter_sha256=drafter_sha256)
    if found is None:
        raise ValueError(
            f"no evaluation of drafter {drafter_version(drafter_sha256)} in "
            f"{cfg.place('evaluations')}: run `flywheel evaluate` on its folder"
        )
    if "conversations" not in found:
        raise ValueError(
            f"the evaluation of {found['drafter']} was written by an older version: "
            "run `flywheel evaluate` again"
        )
    return found


def _newest(place: Place, **where: Any) -> Row | None:
    """The newest result that has these values; None if there is none."""
    found = newest_json(place, list(where))
    return next((result for result in found if pick([result], **where)), None)
