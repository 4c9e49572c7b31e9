"""A progress bar for work in another process, maybe on another node, which tells how far it is."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tqdm import tqdm

from jobs.base.cluster import shares_only_a_bucket
from jobs.base.config import Config
from store.place import Place

POLL_SECONDS = 0.5
BUCKET_SECONDS = 2.0
"""Between two counts in a bucket."""


class Progress:
    """How many steps are done: an object that one process writes and another one reads."""

    def __init__(self, place: Place, name: str):
        self.place, self.name = place, f".{name}.step"
        self.written = 0.0

    def advance(self, count: int) -> None:
        """Tell that `count` of the total are done."""
        if self.place.is_local:
            (self.place.path / self.name).write_text(str(count))
        elif time.monotonic() > self.written + BUCKET_SECONDS:
            self.written = time.monotonic()
            with suppress(OSError):  # the next one may get through
                self.place.write(self.name, str(count).encode())

    @contextmanager
    def follow(self, total: int, label: str, unit: str) -> Iterator[None]:
        """Show a bar while the block runs; `advance` in another process moves it."""
        if self.place.is_local:
            self.place.path.mkdir(parents=True, exist_ok=True)
        done = threading.Event()

        def poll() -> None:
            seconds = POLL_SECONDS if self.place.is_local else BUCKET_SECONDS
            with tqdm(total=total, desc=label, unit=unit) as bar:
                while not done.wait(seconds):
                    bar.update(max(0, self._read() - bar.n))
                bar.update(max(0, self._read() - bar.n))

        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            with suppress(OSError):
                self.place.delete([self.name])

    def _read(self) -> int:
        try:
            return int(self.place.read(self.name) or b"0")
        except (OSError, ValueError):  # read between truncation and write
            return 0


def progress_of(cfg: Config, name: str) -> Progress:
    """Where rank 0 tells the number of steps done: in scratch, or for other nodes in the bucket."""
    here = Place(str(cfg.path("runs")))
    return Progress(cfg.place("runs") if shares_only_a_bucket(cfg) else here, name)
