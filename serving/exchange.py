"""Load, exchange and forget drafters of one running engine, and remember what went wrong.

The checks before a drafter is staged: its files are the drafter that was announced (sha256), it was
trained for this target, and it has the shape that runs. After an exchange every worker must report
what it reported of the fresh load: number of tensors, their sha256, the drafts of the probe
(serving.swap). If one does not, the former drafter comes back.
"""

import asyncio
import os
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dflash.checkpoint import compat_fields, drafter_sha256, load_drafter, read_config
from serving import loaded

Looks = list[dict[str, Any]]
"""What serving.swap reports of a drafter, one entry per worker."""


class Refused(ValueError):
    """A request that cannot be served: HTTP status, and whether a restart would do it."""

    def __init__(self, status: int, message: str, restart: bool = False):
        super().__init__(message)
        self.status, self.restart = status, restart


@dataclass(frozen=True, kw_only=True, slots=True)
class Known:
    """A drafter in this process. `looks` is what its workers say of it."""

    version: str
    sha256: str
    compat: dict[str, Any]
    looks: Looks

    def status(self) -> dict[str, Any]:
        """As GET /flywheel/replica tells it."""
        first = self.looks[0]
        return {
            "version": self.version,
            "sha256": self.sha256,
            "compat": self.compat,
            "tensors": first["tensors"],
            "parameters_sha256": first["parameters_sha256"],
        }


@dataclass
class Drafters:
    """The drafters of one engine. `engine` is vLLM's client of it, `folder` where files arrive.

    One method at a time runs; the others wait.
    """

    engine: Any
    config: Any  # vLLM's VllmConfig
    target_id: str
    folder: Path
    count: Callable[[str], None]  # told what became of each request to change something
    active: Known | None = None
    staged: Known | None = None
    loaded_one: Known | None = None  # what is in the model, also while nothing is drafted
    state: str = "starting"
    fault: str = ""
    swaps: int = 0
    refused: int = 0
    started_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat())
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def begin(self, version: str) -> None:
        """Find out what the engine has loaded at its start, and say so (serving.loaded)."""
        async with self.lock:
            looks = await self._call("flywheel_describe")
            if all(looks):
                folder = Path(self.config.speculative_config.draft_model_config.model)
                sha256 = await asyncio.to_thread(drafter_sha256, folder)
                compat = self._compat(folder)
                version = version or folder.name
                known = Known(version=version, sha256=sha256, compat=compat, looks=looks)
                self.active = self.loaded_one = known
                loaded.began(version, sha256)
            self.state = "ready"

    def status(self) -> dict[str, Any]:
        """What GET /flywheel/replica answers."""
        return {
            "replica": loaded.replica_name(),
            "state": self.state,
            "target_id": self.target_id,
            "k": self._k(),
            "active": self.active and self.active.status(),
            "staged": self.staged and self.staged.status(),
            "swaps": self.swaps,
            "refused": self.refused,
            "fault": self.fault,
            "started_at": self.started_at,
        }

    async def load(self, version: str, sha256: str, target_id: str) -> Known:
        """Stage the drafter whose files have arrived; they are removed then, whatever comes of it.

        Raises Refused: 422 for what must never be served here, 409 for what only a restart can and
        for files that have to be sent again, 503 for a fault of the disk.
        """
        async with self.lock:
            arrived, folder = self.folder / sha256, self.folder / f"loading-{sha256}"
            try:
                if arrived.is_dir():  # whoever sends the same files again does not touch these
                    shutil.rmtree(folder, ignore_errors=True)
                    os.replace(arrived, folder)
                self._check(folder, sha256, target_id)
                await asyncio.to_thread(self._check_files, folder, sha256)
                looks = await self._call("flywheel_stage", str(folder))
            except Refused as error:
                self._refuse(error)
                raise
            except Exception as error:
                await self._forget()
                status = 503 if isinstance(error, OSError) else 422
                refusal = Refused(status, f"drafter {sha256[:12]} could not be loaded: {error}")
                self._refuse(refusal)
                raise refusal from error
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            assert self.loaded_one is not None
            compat = self.loaded_one.compat
            self.staged = Known(version=version, sha256=sha256, compat=compat, looks=looks)
            return self.staged

    async def activate(self, sha256: str) -> float:
        """Let the staged drafter serve, or none for an empty `sha256`; returns the seconds that the
        engine was paused. Raises Refused: 409 if it is not staged, 500 after an exchange that was
        undone (the former drafter serves) or could not be: then `state` is broken, and `active` is
        None until an exchange succeeds, since nobody knows what is loaded.
        """
        async with self.lock:
            if self.active is not None and self.active.sha256 == sha256:
                return 0.0  # the answer to the first request was lost
            known = self.loaded_one if self.state == "ready" else None
            change: Callable[[], Any] = self._exchange
            if not sha256:
                change = self._silence
            elif self.active is None and known is not None and known.sha256 == sha256:
                change = self._speak
            elif self.staged is None or self.staged.sha256 != sha256:
                raise Refused(409, f"drafter {sha256[:12]} is not staged: load it first")
            before, self.state, started = self.state, "swapping", time.perf_counter()
            try:
                try:
                    # It may fail when it has paused already.
                    await self.engine.pause_generation(mode="keep", clear_cache=True)
                    await change()
                finally:
                    await self.engine.resume_generation()
            except Refused as error:
                self.state = before if self.state == "swapping" else self.state
                self._refuse(error)
                raise
            except Exception as error:
                self._break(f"{type(error).__name__}: {error}")
                raise
            self.state = "ready"
            seconds = time.perf_counter() - started
            await self._forget()
            self.swaps += 1
            self.fault = ""
            self.count("done")
            return seconds

    async def drop(self) -> None:
        """Forget what is staged."""
        async with self.lock:
            await self._forget()

    async def _exchange(self) -> None:
        former, wanted = self.loaded_one, self.staged
        assert former is not None
        assert wanted is not None
        found, why = await self._try("flywheel_exchange")
        if found != wanted.looks:
            why = why or _difference(found, wanted.looks)
            now, again = await self._try("flywheel_describe")
            if now != former.looks:
                now, again = await self._try("flywheel_exchange")
            if now != former.looks:
                self._break()
                await self._try("flywheel_silence", True)
                after = f"the former one did not come back ({again or 'it differs'}): restart it"
            else:
                after = "the former one serves again"
            await self._forget()
            raise Refused(500, f"drafter {wanted.sha256[:12]} did not load right: {why}; {after}")
        if self.active is None:
            await self._call("flywheel_silence", False)
        self._serve(wanted)

    async def _silence(self) -> None:
        if self.loaded_one is not None and not all(await self._call("flywheel_silence", True)):
            raise Refused(
                409,
                "this engine schedules asynchronously, and cannot stop drafting while it runs",
                restart=True,
            )
        self.active = None
        loaded.swapped("", "")

    async def _speak(self) -> None:
        assert self.loaded_one is not None
        await self._call("flywheel_silence", False)
        self._serve(self.loaded_one)

    def _serve(self, known: Known) -> None:
        self.active = self.loaded_one = known
        loaded.swapped(known.version, known.sha256)

    def _check(self, folder: Path, sha256: str, target_id: str) -> None:
        if self.loaded_one is None:
            raise Refused(409, "this server was started without a drafter", restart=True)
        if not folder.is_dir():
            raise Refused(409, f"no files of drafter {sha256[:12]} have arrived: send them first")
        if target_id != self.target_id:
            raise Refused(
                422, f"the drafter is for target {target_id}, this server has {self.target_id}"
            )

    def _check_files(self, folder: Path, sha256: str) -> None:
        found = "no drafter"
        with suppress(ValueError):
            found = f"drafter {drafter_sha256(folder)}"
        if found != f"drafter {sha256}":
            raise Refused(409, f"the files that arrived are {found[:20]}: send them again")
        try:
            load_drafter(folder)  # names and shapes of all tensors: vLLM would not miss one
            compat = self._compat(folder)
        except ValueError as error:
            raise Refused(422, f"drafter {sha256[:12]} cannot be served: {error}") from error
        assert self.loaded_one is not None
        runs = self.loaded_one.compat
        unlike = [
            f"{name} {compat.get(name, 0)} != {runs.get(name, 0)}"
            for name in runs | compat
            if compat.get(name) != runs.get(name)
        ]
        if unlike:
            raise Refused(
                409,
                f"drafter {sha256[:12]} has another shape than the one that runs "
                f"({', '.join(unlike)}): the server has to be restarted with it",
                restart=True,
            )

    def _compat(self, folder: Path) -> dict[str, Any]:
        return compat_fields(read_config(folder), self.target_id)

    def _k(self) -> list[int]:
        spec = self.config.speculative_config
        if spec is None:
            return []
        schedule = spec.num_speculative_tokens_per_batch_size
        if not schedule:
            return [spec.num_speculative_tokens]
        return [k for first, last, k in schedule for _ in range(first, last + 1)]

    def _break(self, fault: str = "") -> None:
        """Nobody knows what is loaded from now on: no drafter is named, and the next one is
        verified even if it was the last.
        """
        self.state, self.active, self.fault = "broken", None, fault
        loaded.swapped("", "")

    def _refuse(self, error: Refused) -> None:
        self.refused += 1
        self.fault = str(error)
        self.count("undone" if error.status == 500 else "refused")

    async def _forget(self) -> None:
        self.staged = None
        if self.loaded_one is not None:
            await self._call("flywheel_unstage")

    async def _try(self, method: str, *args: Any) -> tuple[Looks | None, str]:
        """What the workers say, or None and why not."""
        try:
            return await self._call(method, *args), ""
        except Exception as error:  # noqa: BLE001 (whatever it is, the former drafter comes back)
            return None, f"{type(error).__name__}: {error}"

    async def _call(self, method: str, *args: Any) -> list[Any]:
        return await self.engine.collective_rpc(method, args=args)


def _difference(found: Looks | None, wanted: Looks) -> str:
    """In which respects what serves is not what was staged, in words."""
    names = {"tensors": "number of tensors", "parameters_sha256": "weights", "probe": "drafts"}
    pairs = list(zip(found or [], wanted, strict=False))
    unlike = [text for name, text in names.items() if any(a[name] != b[name] for a, b in pairs)]
    return f"its {', '.join(unlike)} differ from those of a fresh load"
