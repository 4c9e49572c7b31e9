"""Tokenizers and chat templates of every target that traffic was ingested for.

Prompts are kept as token ids. After a change of the target, only its former tokenizer says what
they are, and by then its folder may be gone. So ingest keeps a copy in <work>/targets/<target_id>.
"""

from pathlib import Path

from dflash.identity import READ, READ_TOO, TEMPLATES, target_id
from jobs.base.config import Config

LAST = "config.json"
"""Written at the end: where it is, all of a copy is there. AutoTokenizer reads it, too."""
LEFT_OUT = (".safetensors", ".index.json", ".py")
NO_MATTER = (LAST, "generation_config.json", "preprocessor_config.json")
"""Of the kept files, those that do not change the ids of a prompt."""


def keep(cfg: Config, folder: Path) -> str:
    """Keep what renders prompts for this target folder, if it is not kept yet; returns its
    target_id.
    """
    identity = target_id(folder)
    place = cfg.place("targets", identity)
    if not place.has(LAST):
        for file in sorted(_files(folder), key=lambda path: path.name == LAST):
            place.write(file.relative_to(folder).as_posix(), file)
    return identity


def kept(cfg: Config, identity: str) -> Path | None:
    """The copy for a target_id as a local folder; None if there is none."""
    place = cfg.place("targets", identity)
    return place.fetch(cfg.path("fetched")) if place.has(LAST) else None


def renders_alike(folder: Path, other: Path) -> bool:
    """Whether two target folders turn the same messages into the same ids: their tokenizers and
    templates are equal byte for byte.
    """
    a, b = (
        {p.relative_to(one): p.read_bytes() for p in _files(one) if p.name not in NO_MATTER}
        for one in (folder, other)
    )
    return a == b


def _files(folder: Path) -> list[Path]:
    found = [p for p in folder.iterdir() if p.suffix in READ or p.name in READ_TOO]
    found += (folder / TEMPLATES).glob("*.jinja")
    return [p for p in found if not p.name.endswith(LEFT_OUT) and not p.name.startswith(".")]
