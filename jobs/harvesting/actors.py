"""The Ray actors of a harvest: what each gets of the cluster, and what they do.

One thread of the driver for each actor hands it a chunk, waits for the result, and takes the next
chunk: so a slow one holds up no other. An actor that dies is replaced, on any node, and its chunk
goes back.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import pyarrow as pa
import ray
import torch
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from dflash.identity import target_id
from jobs.base.cluster import cluster, node_id, on_node
from jobs.base.config import Config
from jobs.base.console import console
from jobs.base.placement import Node, Wanted, cluster_nodes, in_words, placed, places
from jobs.harvesting.harvester import Harvested, Harvester, aside_row
from jobs.harvesting.screening import KILLED, Fault
from store.place import Place, first_line
from store.schemas import FEATURE_INDEX

KILLS = 2
"""Engines that a chunk ends before it is set aside."""
IN_A_ROW = 3
"""Chunks set aside, with none finished between them, before the harvest stops: it is not them."""
STARTS = 3
"""Actors that end before they have an engine, one after the other, before a thread gives up."""
POLL_SECONDS, NODE_SECONDS = 1.0, 300.0
"""How often a thread asks whether its actor has a place; how long there may be no node for it."""


def by_actors(
    cfg: Config, place: Place, chunks: Iterator[pa.Table], num_chunks: int
) -> Iterator[Harvested]:
    """Harvest chunks with Ray actors; yields what each came to, in the order they finish. A chunk
    is taken when an actor is free for it: that bounds what is in memory.

    A chunk that ends two engines is set aside. Raises ValueError if the actors can never be placed,
    and if chunk after chunk ends its engines; and what an engine raised if none of them starts.
    """
    with cluster(cfg):
        whole, free = cluster_nodes()
        share, number = actor_share(cfg, whole, free), min(cfg.harvest.workers, num_chunks)
        note_waiting(share, free, number)
        yield from Crew(cfg, place, chunks, share).run(number)


def actor_share(cfg: Config, whole: list[Node], free: list[Node]) -> dict[str, Any]:
    """CPUs and GPUs of each actor, such that all fit on the nodes of the cluster. GPUs are asked
    for where the cluster has any, whatever the driver's machine has.

    Raises ValueError if they do not fit.
    """
    harvest, device = cfg.harvest, cfg.target.device
    on_gpus = device == "cuda" or (device == "auto" and any(node.gpus for node in whole))
    gpus = harvest.gpus if on_gpus else 0
    wanted = Wanted("harvest", harvest.workers, harvest.cpus, gpus, "target.device")
    threads = placed(cfg, wanted, whole, free)
    if not cfg.ray.address:  # on this machine a limit given to torch (OMP_NUM_THREADS) applies
        threads = min(threads, torch.get_num_threads())
    return {"num_cpus": threads, "num_gpus": gpus}


def note_waiting(share: dict[str, Any], free: list[Node], number: int) -> None:
    """Say so if other jobs hold what the actors need; the progress bar would just stay at 0."""
    room = places(free, share["num_cpus"], share["num_gpus"])
    if room < number:
        console.print(
            f"harvest: Ray has room for {room} of {number} engines of {share['num_cpus']} CPUs and "
            f"{share['num_gpus']:g} GPUs now; the others wait for other jobs of the cluster to end"
        )


class NotStarted(Exception):
    """An engine met something that the user has to repair: a second start would meet it, too."""


class Engine:
    """The actor: a Harvester in a process of its own."""

    def open(self, cfg: Config, home: str, threads: int) -> tuple[str, dict[str, str]]:
        """Load the engine; returns the node it is on, and what it is for SET_ASIDE rows. What this
        raises is what the user gets; Ray would wrap an error of `__init__`.
        """
        self.harvester = Harvester(on_node(cfg, home), threads)
        return node_id(), self.harvester.engine

    def shard(self, place: Place, chunk: pa.Table) -> Harvested:
        """As Harvester.shard."""
        return self.harvester.shard(place, chunk)


class Crew:
    """Threads with an actor each. They take chunks until none is left."""

    def __init__(
        self, cfg: Config, place: Place, chunks: Iterator[pa.Table], share: dict[str, Any]
    ):
        self.cfg, self.place, self.chunks, self.share = cfg, place, chunks, share
        self.home, self.lock = node_id(), threading.Lock()
        self.returned: deque[tuple[pa.Table, int]] = deque()  # with how many engines it has ended
        self.exhausted = self.stopped = False
        self.actors: set[Any] = set()
        self.in_a_row = 0
        self.lost: list[BaseException] = []
        # What a thread tells: a result, an error that ends the harvest, or None when it is done.
        self.told: SimpleQueue[Harvested | BaseException | None] = SimpleQueue()

    def run(self, number: int) -> Iterator[Harvested]:
        """The results of `number` actors, as they come."""
        with ThreadPoolExecutor(number, thread_name_prefix="harvest") as pool:
            try:
                for _ in range(number):
                    pool.submit(self._work)
                while number:
                    told = self.told.get()
                    if isinstance(told, BaseException):
                        raise told
                    if told is None:
                        number -= 1
                    else:
                        yield told
                if self._is_left():
                    raise self.lost[-1]
            finally:
                self._stop()

    def _stop(self) -> None:
        """End all actors, and with them what threads wait for."""
        with self.lock:
            self.stopped, left = True, list(self.actors)
        for actor in left:
            ray.kill(actor)

    def _work(self) -> None:
        """Keep one actor at work until no chunk is left."""
        starts = 0
        try:
            while starts < STARTS and self._is_left():
                starts += 1
                try:
                    for done in self._results_of_one():
                        starts = 0
                        if done is not None:
                            self.told.put(done)
                except RayError as error:
                    if isinstance(error, ValueError | OSError):  # a full disk, a damaged file
                        raise
                    self._note(
                        error, f"harvest: an engine ended ({_why(error)}); its chunk goes back"
                    )
        except NotStarted as error:  # others may do without it
            cause = error.args[0]
            self._note(cause, f"harvest: an engine did not start: {_why(cause)}")
        except BaseException as error:  # noqa: BLE001 - `run` raises it
            self.told.put(error)
        finally:
            self.told.put(None)

    def _note(self, error: BaseException, text: str) -> None:
        """Remember what ended an actor; say so, unless it was the end of the harvest."""
        self.lost.append(error)
        if self._is_left():
            console.print(text, markup=False)

    def _results_of_one(self) -> Iterator[Harvested | None]:
        """None when an actor has its engine, and then what it makes of the chunks that it takes.
        Raises RayError when it is no good any more, or was not from the start.
        """
        actor = self._actor()
        try:
            if opened := self._opened(actor):
                yield None
                while taken := self._next():
                    yield self._harvested(actor, opened, *taken)
        finally:
            with self.lock:
                self.actors.discard(actor)
            ray.kill(actor)

    def _actor(self) -> Any:
        with self.lock:
            actor: Any = (
                ray.remote(Engine).options(**self.share, scheduling_strategy="SPREAD").remote()
            )
            self.actors.add(actor)
        return actor

    def _opened(self, actor: Any) -> tuple[str, dict[str, str]] | None:
        """The node and the engine of an actor; None if there is nothing left for it to do before it
        has a place. Raises ValueError if no node could have it for NODE_SECONDS.
        """
        opening = actor.open.remote(self.cfg, self.home, self.share["num_cpus"])
        since = time.monotonic()
        while not ray.wait([opening], timeout=POLL_SECONDS)[0]:
            if not self._is_left():
                return None
            whole, _ = cluster_nodes()
            if places(whole, self.share["num_cpus"], self.share["num_gpus"]):
                since = time.monotonic()
            elif time.monotonic() > since + NODE_SECONDS:
                raise ValueError(
                    f"harvest: nodes are gone, and none that is left ({in_words(whole)}) can have "
                    f"an engine of {self.share}: start nodes, or run the same command again"
                )
        try:
            return ray.get(opening)
        except (ValueError, OSError) as error:
            raise NotStarted(error) from error

    def _is_left(self) -> bool:
        """Whether there may be a chunk to take."""
        return not self.stopped and bool(self.returned or not self.exhausted)

    def _next(self) -> tuple[pa.Table, int] | None:
        """A chunk, and how many engines it has ended; None if none is left."""
        with self.lock:
            if self.stopped:
                return None
            if self.returned:
                return self.returned.popleft()
            for chunk in self.chunks:
                return chunk, 0
            self.exhausted = True
        return None

    def _harvested(
        self, actor: Any, opened: tuple[str, dict[str, str]], chunk: pa.Table, kills: int
    ) -> Harvested:
        """What the actor made of the chunk. If that ended the actor, the chunk goes back, or is set
        aside, and RayError is raised.
        """
        try:
            done: Any = ray.get(actor.shard.remote(self.place, chunk))
            self.in_a_row = 0
            return done
        except RayError as error:
            if isinstance(error, ValueError | OSError):
                raise
            kills += self._is_its_fault(error, opened[0])
            if kills < KILLS:
                self.returned.append((chunk, kills))
            else:
                self.told.put(self._set_aside(chunk, opened[1], error))
            raise

    def _is_its_fault(self, error: RayError, node: str) -> bool:
        """Whether an actor ended by the chunk that it had, and not with its node."""
        if isinstance(error, RayTaskError):  # the engine raised something: it may be dead
            return True
        alive = {found["NodeID"] for found in ray.nodes() if found["Alive"]}
        return node in alive and not isinstance(error, ActorUnavailableError)

    def _set_aside(self, chunk: pa.Table, engine: dict[str, str], error: RayError) -> Harvested:
        """All samples of a chunk that has ended KILLS engines. Raises ValueError if the chunks
        before it did so, too.
        """
        self.in_a_row += 1
        if self.in_a_row == IN_A_ROW:
            raise ValueError(
                f"{IN_A_ROW} shards in a row ended {KILLS} engines each, the last one by "
                f"{_why(error)}: if memory ran out, lower harvest.batch_tokens; then run the same "
                "command again. What was finished before is kept"
            )
        rows, identity = chunk.to_pylist(), target_id(self.cfg.target_path)
        fault = Fault(KILLED, {"shard": rows[0]["sample_id"], "error": _why(error)})
        made = (aside_row(row, identity, self.place.name, fault) | engine for row in rows)
        return Harvested(FEATURE_INDEX.empty_table(), list(made))


def _why(error: RayError) -> str:
    """What ended an actor, in one line, without Ray's account of where it was."""
    if cause := getattr(error, "cause", None):
        return f"{type(cause).__name__}: {first_line(cause)}"
    return str(error).strip().splitlines()[-1][:200]
