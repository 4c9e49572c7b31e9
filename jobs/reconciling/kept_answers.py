"""The answers that a roll-out compares, kept in <work>/rollouts/<number>/ as they are read.

A replica keeps its last finished requests only, and a killed reconciler must not begin its test
again: so each look writes one object with what was new. Its number tells the next look from a
repeated one. Conversations are named by hashes.
"""

import json
from collections.abc import Sequence
from typing import Any

from jobs.base.config import Config
from jobs.reconciling.evidence import CANARY, MOST_K, REST, Answer, Arms, answer_of
from jobs.reconciling.observed import Fleet
from serving.replica_client import ReplicaFault
from store.ids import short_hash
from store.place import Place, read_json

Cursor = dict[str, Any]
"""Of one replica: `started` of its process, `next` number, `requests` and `failed` so far."""
BEFORE = "before"
"""The window of answers from before the swap, of a replica that has no others beside it."""


class KeptAnswers:
    """All answers of one roll-out. `arms` has those of windows in which both sides answered."""

    def __init__(self, place: Place, slices: Sequence[str]):
        self.place, self.slices = place, list(slices)
        self.arms = Arms(self.slices)
        self.cursors: dict[str, Cursor] = {}
        self.waiting: dict[str, dict[str, list[Answer]]] = {}  # windows of one side only
        self.matched: set[str] = set()
        self.lost = 0
        self.number = 0
        for found in sorted(f.name for f in place.objects()):
            batch = read_json(place, found, ["cursors", "answers"])
            if batch is not None:
                self._take(batch)
                self.number = int(found.removesuffix(".json"))

    def add(self, batch: dict[str, Any]) -> bool:
        """Keep and count a batch; returns whether it has anything new."""
        if not any(batch["answers"].values()) and self.cursors == batch["cursors"]:
            return False
        data = json.dumps(batch).encode()
        if not self.place.create(f"{self.number + 1:06d}.json", data):
            raise ValueError(f"{self.place}: another roll-out writes here; run the command again")
        self.number += 1
        self._take(batch)
        return True

    def _take(self, batch: dict[str, Any]) -> None:
        self.cursors = batch["cursors"]
        self.lost += batch.get("lost", 0)
        if batch.get("counts"):
            self.arms.failures.append(tuple(batch["counts"]))
        for side, rows in batch["answers"].items():
            for window, *row in rows:
                self._place(side, str(window), _unpacked(row))

    def _place(self, side: str, window: str, answer: Answer) -> None:
        """Count an answer once the other side has one in the same window, too."""
        if window == BEFORE or window in self.matched:
            self.arms.add(side, answer)
            return
        waiting = self.waiting.setdefault(window, {CANARY: [], REST: []})
        waiting[side].append(answer)
        if waiting[CANARY] and waiting[REST]:
            self.matched.add(window)
            for name, answers in self.waiting.pop(window).items():
                for one in answers:
                    self.arms.add(name, one)


def read_feeds(
    cfg: Config, fleet: Fleet, kept: KeptAnswers, canary: str, shas: tuple[str, str], alone: bool
) -> tuple[dict[str, Any], list[str]]:
    """(batch, faults): what the replicas have finished since the last look.

    `canary`: its URL; empty before there is one. `shas`: the drafters of canary and rest as loaded;
    answers of any other, and of requests during a swap, are left out. `alone`: the only replica is
    compared with its own answers from before.
    """
    cursors, lost, faults = dict(kept.cursors), 0, []
    answers: dict[str, list[list[Any]]] = {CANARY: [], REST: []}
    counts = [0, 0, 0, 0]
    for url in fleet.urls:
        known = cursors.get(url) or {"started": None, "next": 0, "requests": 0, "failed": 0}
        try:
            with fleet.client(url, cfg) as client:
                found = client.acceptance(known["next"])
                if found.get("started") != known["started"]:  # its process began anew
                    known = {"started": found.get("started"), "next": 0, "requests": 0, "failed": 0}
                    found = client.acceptance(0)
        except ReplicaFault as error:
            faults.append(str(error))
            continue
        ours = url == canary
        if url in cursors or alone:  # what it did before it was first looked at does not count
            lost += int(found.get("lost") or 0)
            for row in found.get("rows") or []:
                side = CANARY if row.get("drafter_sha256") == shas[0] and (ours or alone) else REST
                wanted = shas[0] if side == CANARY else shas[1]
                if row.get("drafter_sha256") == wanted and (alone or ours == (side == CANARY)):
                    try:
                        packed = _packed(answer_of(row, kept.slices))
                    except ValueError as error:
                        faults.append(f"{url}: rows of its feed are left out: {error}")
                        continue
                    window = BEFORE if alone else int(row["finished_at"] // cfg.rollout.window)
                    answers[side].append([window, *packed])
            at = 0 if ours else 2
            counts[at] += max(0, int(found["requests"]) - known["requests"])
            counts[at + 1] += max(0, int(found["failed"]) - known["failed"])
        cursors[url] = {name: found.get(name) for name in ("started", "next", "requests", "failed")}
    batch = {"cursors": cursors, "answers": answers, "lost": lost}
    return batch | ({"counts": counts} if canary and any(counts) else {}), faults


def _packed(answer: Answer) -> list[Any]:
    """An answer as JSON, without the trailing zeros of its counts."""
    offered, tried, passed = answer.counts
    used = sum(1 for n in offered if n)
    counts = [offered[:used], tried[:used], passed[:used]]
    conversation = short_hash(answer.conversation)[:12]
    times = [round(answer.seconds, 4), answer.tokens, answer.first_token]
    return [answer.slice, conversation, answer.rounds, counts, *times]


def _unpacked(row: list[Any]) -> Answer:
    name, conversation, rounds, counts, seconds, tokens, first = row
    offered, tried, passed = ([*c, *([0] * (MOST_K - len(c)))] for c in counts)
    return Answer(name, conversation, rounds, (offered, tried, passed), seconds, tokens, first)
