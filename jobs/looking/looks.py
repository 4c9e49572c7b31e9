"""Looks at a work folder in the background: the page shows the last one at once, and how old it is.

A question over large tables can take long, the first one after new rows above all. So nobody who
opens the page waits for it, and however many open it, there is one look at a time.
"""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from threading import Lock, Thread

from jobs.base.config import Config
from jobs.looking.aside import set_aside
from jobs.looking.parts import Section
from jobs.looking.sections import SECTIONS
from jobs.looking.sources import Sources
from store.place import first_line

KEPT = 30.0
"""Seconds for which a look is new enough."""


@dataclass
class Looks:
    """`folder`: where readers write (jobs/looking/aside.py). `sections`: by name, the latest of
    each, which the look that runs now replaces one after the other.
    """

    cfg: Config
    folder: Path
    sections: dict[str, Section] = field(default_factory=dict)
    taken: datetime | None = None
    """When the last whole look ended."""
    patience: float = 2.0
    """Seconds for which a page waits for a newer look."""
    _running: Thread | None = None
    _seen: Sources | None = None
    _closed: bool = False
    _lock: Lock = field(default_factory=Lock)

    def begin(self) -> Thread | None:
        """The look that runs; one is begun if the last is old. None if it is new enough."""
        with self._lock:
            if self._running is not None and self._running.is_alive():
                return self._running
            if self._closed:
                return None
            if self.taken and (datetime.now(UTC) - self.taken).total_seconds() < KEPT:
                return None
            self._running = Thread(target=self.look, daemon=True)
            self._running.start()
            return self._running

    def refresh(self) -> bool:
        """Begin a look if the last is old, and wait a little. Returns whether it still runs."""
        running = self.begin()
        if running is None:
            return False
        running.join(self.patience)
        return running.is_alive()

    def close(self) -> None:
        """End the look that runs, and wait for that: a database that is open when the interpreter
        ends can abort it.
        """
        with self._lock:
            self._closed = True
        if self._seen is not None:
            self._seen.interrupt()
        if self._running is not None:
            self._running.join()

    def look(self) -> None:
        """Look at everything now."""
        seen = Sources(self.cfg, set_aside(self.cfg, self.folder), datetime.now(UTC))
        self._seen = seen
        try:
            with seen.reading():
                for name in SECTIONS:
                    if self._closed:
                        return
                    self.sections = self.sections | {name: _section(name, seen)}
        except (OSError, ValueError) as error:  # such as no space for what readers write
            title, _ = SECTIONS["now"]
            self.sections = {"now": Section("now", title, fault=first_line(error))}
        self.taken = datetime.now(UTC)


def _section(name: str, seen: Sources) -> Section:
    title, make = SECTIONS[name]
    section = Section(name, title)
    try:
        make(seen, section)
    except Exception as error:  # noqa: BLE001 (whatever it met, the other sections are shown)
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        section.fault = f"{kind}{first_line(error)}"
    return section
