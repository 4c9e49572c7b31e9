"""The Ray tasks of ingest: hash logs that are new or have changed, and parse logs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from jobs.base.cluster import cluster, shares_only_a_bucket
from jobs.base.config import Config
from jobs.base.placement import at_the_driver
from jobs.dataset.chat_rendering import ChatRenderer
from store.digests import Digest, Digests, digest_log
from store.log_files import Stamp
from store.log_formats import Rules
from store.log_states import SHARDED, LogState, States
from store.log_to_traffic import READING, ingest_log, key_of

COPIES = "logs_read"
"""Folder below scratch of copies of logs in buckets, while they are read."""
Each = Callable[[Any, Sequence[tuple]], list[Any]]


@dataclass(frozen=True, slots=True)
class Read:
    """What became of one content under the rules of this run.

    `stale`: states that it replaces: the same log when it was shorter or under other rules.
    `of_others`: such states under another target; their samples stay, for `flywheel regenerate`.
    `done`: the tables have all that they should have of it. `reused`: it was not parsed now.
    """

    state: LogState
    stale: list[LogState]
    of_others: list[LogState]
    done: bool
    reused: bool


@contextmanager
def tasks(cfg: Config) -> Iterator[Each]:
    """A function that runs another one on each tuple of arguments as a Ray task, and returns the
    results in order. Ray is started for its first task. Tasks read logs, copies of logs and the
    target on this machine, so they run here.
    """
    with ExitStack() as stack:

        def each(function: Any, arguments: Sequence[tuple]) -> list[Any]:
            if not arguments:
                return []
            if not ray.is_initialized():
                stack.enter_context(cluster(cfg))
            task = ray.remote(function)
            if shares_only_a_bucket(cfg):
                task = task.options(**at_the_driver())
            return ray.get([task.remote(*args) for args in arguments])

        yield each


def digests(
    each: Each, cfg: Config, kept: Digests, logs: Mapping[str, Stamp], states: States
) -> dict[str, tuple[Stamp, Digest]]:
    """(stamp, digest) of each log (store/digests.py). Only logs that changed since the last run are
    read. Of their prefixes, those remain that are a known state.
    """
    known = {log: kept.get(log, stamp) for log, stamp in logs.items()}
    unread = [log for log, digest in known.items() if digest is None]
    sizes = {size for size, _ in states.by_content}
    jobs = [(log, sizes, cfg.path(COPIES)) for log in unread]
    for log, (size, sha, prefixes) in zip(unread, each(digest_log, jobs), strict=True):
        mine = {p[0]: p[1] for p in prefixes.items() if p in states.by_content or p[0] == size}
        known[log] = size, sha, mine
    return {log: (stamp, digest) for log, stamp in logs.items() if (digest := known[log])}


def read_each(
    each: Each, cfg: Config, digested: dict[str, tuple[Stamp, Digest]], rules: Rules, states: States
) -> list[Read]:
    """What became of each distinct content; one task for each that is neither in the tables nor
    has a marker. Its shards are written, but not published yet.
    """
    contents: dict[str, tuple[str, Digest]] = {}
    for log, (_, digest) in digested.items():
        contents.setdefault(key_of(digest[1], rules), (log, digest))
    former = {
        key: [s for s in states.of_content(prefixes) if s.log not in contents]
        for key, (_, (_, _, prefixes)) in contents.items()
    }
    # An earlier reading may have kept what must not be kept, whatever the target was.
    ours = (rules.target_id, *rules.former_ids)
    stale = {
        key: [s for s in found if s.target_id in ours or s.reading != READING]
        for key, found in former.items()
    }
    others = {key: [s for s in former[key] if s not in stale[key]] for key in former}
    done = {key for key in contents if states.is_whole(key) and not stale[key]}
    found = {key: states.published[key] for key in done}
    waiting = contents.keys() & states.marked.keys() - done
    found |= {key: states.marked[key] for key in waiting}
    unread = [key for key in contents if key not in found]
    more = rules, *(cfg.table(name) for name in SHARDED), cfg.place("ingesting"), cfg.path(COPIES)
    render = ChatRenderer(cfg.target_path).answers if rules.text == "answers" else None
    jobs = [(log, *digest[:2], *more) for log, digest in map(contents.__getitem__, unread)]
    jobs = [(*job, render) for job in jobs]
    parsed = dict(zip(unread, each(ingest_log, jobs), strict=True))
    states_now = found | parsed
    return [
        Read(states_now[key], stale[key], others[key], key in done, key in found)
        for key in contents
    ]
