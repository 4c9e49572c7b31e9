"""A progress bar for work in another process, which writes its progress to a file."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

POLL_SECONDS = 0.5


@contextmanager
def follow(path: Path, total: int, label: str, unit: str) -> Iterator[None]:
    """Show a bar while the block runs; `advance(path, n)` in another process moves it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    done = threading.Event()

    def poll() -> None:
        with tqdm(total=total, desc=label, unit=unit) as bar:
            while not done.wait(POLL_SECONDS):
                bar.update(max(0, _read(path) - bar.n))
            bar.update(max(0, _read(path) - bar.n))

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        path.unlink(missing_ok=True)


def advance(path: Path, count: int) -> None:
    """Write that `count` of the total are done."""
    path.write_text(str(count))


def _read(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # not written yet, or read between truncation and write
        return 0
