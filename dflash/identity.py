"""The identity of a target: a hash of every byte of its folder that an engine reads.

A partial fine-tune changes single tensors, so all bytes count. They are read only once: digests are
kept in memory, and those of large files also in the user's cache. A digest is found again by all
that changes when a file does (`Stamp`).
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

READ = (".json", ".safetensors", ".jinja", ".model", ".tiktoken", ".py")
READ_TOO = ("merges.txt", "vocab.txt")
"""What an engine reads of a target, by suffix and by name: config, generation config, quantisation,
index, weights, tokenizer, templates, code. Other files (a README, other formats of the weights) do
not change the identity."""
TEMPLATES = "additional_chat_templates"
LARGE = 64 << 20  # bytes; hashing takes a twentieth of a second, so a file in the cache pays
ANNOUNCED = 4 << 30  # bytes; hashing takes seconds, so a progress bar is shown
BLOCK = 8 << 20
SETTLED_NS = 2_000_000_000
"""Files that changed less than this ago are hashed at every call. Within one tick of the clock of a
file system (2 s on the coarsest), a second write does not change the times."""

Stamp = tuple[str, int, int, int, int]
"""Real path, size, mtime and ctime in ns, inode. Only the system can set ctime."""
_KNOWN: dict[Stamp, str] = {}


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's bytes, read now."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_files(folder: str | os.PathLike) -> list[Path]:
    """The files of a target that an engine reads, sorted. Hidden ones are left out: they are
    unfinished downloads.

    Raises ValueError if the folder holds no model, or its weights in another format only.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file() or not any(folder.glob("[!.]*.safetensors")):
        others = [*folder.glob("*.bin"), *folder.glob("*.pth"), *folder.glob("*.gguf")]
        if others:
            raise ValueError(
                f"{folder} holds weights as {min(others).name} only: save the model as safetensors "
                "beside its config.json (`save_pretrained` of Transformers does both)"
            )
        raise ValueError(
            f"{folder} is not a model folder: it needs config.json and *.safetensors "
            "(set target.path, or run `flywheel target` for the small built-in one)"
        )
    found = [p for p in folder.iterdir() if p.suffix in READ or p.name in READ_TOO]
    found += (folder / TEMPLATES).glob("*.jinja")
    return sorted(p for p in found if p.is_file() and not p.name.startswith("."))


def target_id(folder: str | os.PathLike) -> str:
    """Identity of a target folder: 16 hex digits over all bytes that an engine reads of it.

    The first call reads everything (1.4 GB per second and core, several files at a time). Later
    calls only look at sizes and times. Raises ValueError if the folder is not a model, and for a
    file that changes while it is read.
    """
    folder = Path(folder)
    files = model_files(folder)
    digests = file_digests(files)
    lines = [
        f"{path.relative_to(folder)}\0{digest}\n"
        for path, digest in zip(files, digests, strict=True)
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def file_digests(files: Sequence[Path]) -> list[str]:
    """Hex sha256 of each file, from memory or the cache where the file did not change since."""
    found = [_recall(stamp) for stamp in map(_stamp, files)]
    unread = [path for path, digest in zip(files, found, strict=True) if digest is None]
    if unread:
        read = _read_all(unread)
        found = [next(read) if digest is None else digest for digest in found]
    return [digest for digest in found if digest is not None]


def _read_all(files: Sequence[Path]) -> Iterator[str]:
    size = sum(path.stat().st_size for path in files)
    shown = {"desc": "reading the target once", "unit": "B", "unit_scale": True, "leave": False}
    # Hashing releases the GIL, so threads run in parallel.
    with tqdm(total=size, disable=size < ANNOUNCED, **shown) as bar, ThreadPoolExecutor(8) as pool:
        return iter(list(pool.map(lambda path: _read(path, bar), files)))


def _stamp(path: Path) -> Stamp:
    found = path.stat()
    return os.path.realpath(path), found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino


def _read(path: Path, bar: tqdm) -> str:
    before = _stamp(path)
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK):
            digest.update(block)
            bar.update(len(block))
    if _stamp(path) != before:
        raise ValueError(f"{path} changed while it was read: wait until the model is complete")
    _remember(before, digest.hexdigest())
    return digest.hexdigest()


def _remember(stamp: Stamp, digest: str) -> None:
    """Keep a digest in memory, and that of a large file on disk too. A failure to write is fine."""
    if abs(time.time_ns() - max(stamp[2], stamp[3])) < SETTLED_NS:
        return
    _KNOWN[stamp] = digest
    if stamp[1] < LARGE:
        return
    path = _cached(stamp)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps([*stamp, digest]))
        os.replace(partial, path)
    except OSError:
        return  # a read-only home: the next process reads the target again


def _recall(stamp: Stamp) -> str | None:
    """The digest of an unchanged file; None if it is not known or its entry is damaged."""
    if stamp not in _KNOWN and stamp[1] >= LARGE:
        try:
            *known, digest = json.loads(_cached(stamp).read_bytes())
        except (OSError, ValueError, TypeError):
            return None
        if known == list(stamp) and isinstance(digest, str) and len(digest) == 64:
            _KNOWN[stamp] = digest
    return _KNOWN.get(stamp)


def _cached(stamp: Stamp) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    name = hashlib.sha256(repr(stamp).encode()).hexdigest()
    return Path(home) / "dflash-flywheel" / "digests" / name


LEGACY_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)
LEGACY_SAMPLE = 1 << 20


def legacy_target_id(folder: str | os.PathLike) -> str:
    """The identity that versions before December 2026 gave this folder.

    They read five files, and of each weight file the header and three stretches of 1 MiB. It is
    needed to recognise what was recorded under it; it must not name anything new.
    """
    folder = Path(folder)
    model_files(folder)
    digest = hashlib.sha256()
    for name in LEGACY_FILES:
        path = folder / name
        digest.update(f"{name}\0".encode())
        digest.update(path.read_bytes() if path.is_file() else b"absent")
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
        digest.update(_legacy_sample(path))
    return digest.hexdigest()[:16]


def _legacy_sample(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        header = file.read(8 + int.from_bytes(file.read(8), "little"))
        parts = [header]
        for offset in (len(header), size // 2, max(0, size - LEGACY_SAMPLE)):
            file.seek(offset)
            parts.append(file.read(LEGACY_SAMPLE))
    return b"".join(parts)
