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
    _lock: Lock = field(default_factory=Lock)

    def begin(self) -> Thread | None:
        """The look that runs; one is begun if the last is old. None if it is new enough."""
        with self._lock:
            if self._running is not None and self._running.is_alive():
                return self._running
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

    def look(self) -> None:
        """Look at everything now."""
        seen = Sources(self.cfg, set_aside(self.cfg, self.folder), datetime.now(UTC))
        with seen.reading():
            for name, (title, make) in SECTIONS.items():
                section = Section(name, title)
                try:
                    make(seen, section)
                except Exception as error:  # noqa: BLE001 (whatever it met, the others are shown)
                    known = isinstance(error, ValueError | OSError)
                    kind = "" if known else f"{type(error).__name__}: "
                    section.fault = f"{kind}{first_line(error)}"
                self.sections = self.sections | {name: section}
        self.taken = datetime.now(UTC)
