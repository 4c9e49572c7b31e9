"""A folder on a local disk or in a bucket: one code path for both (obstore).

A write is atomic: a reader sees all of an object or none of it. `create` succeeds for exactly one
of several writers, on whatever hosts they run. Credentials and endpoints of a bucket are taken from
the usual environment variables (AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID ...), as deltalake does, too.
"""

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import obstore
import pyarrow as pa
import pyarrow.fs as pafs
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import LocalStore, ObjectStore, from_url

from store.arrow_files import azure_account, files_of

SCHEMES = ("s3", "gs", "az")
"""Object stores that a place may be in."""
# Ten retries, the default, last two seconds; a store may need longer.
RETRIES: Any = {
    "max_retries": 1000,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"max_backoff": timedelta(seconds=2)},
}
# Given options replace those of the environment (AWS_ALLOW_HTTP). http:// is used only where the
# endpoint in the environment says so.
CLIENT: Any = {
    "connect_timeout": "5s",
    "read_timeout": "30s",
    "timeout": "600s",
    "allow_http": True,
}


@dataclass(frozen=True, slots=True)
class Found:
    """An object below a place: its name relative to that, bytes, time and version of its content.

    e_tag changes whenever the object is written again.
    """

    name: str
    size: int
    modified: datetime
    e_tag: str


@dataclass(frozen=True, slots=True)
class Place:
    """A folder. `root` is a local path or the URL of a bucket or of a prefix in it; `key` is the
    place below it, "" for the root itself.
    """

    root: str
    key: str = ""

    def __truediv__(self, name: str) -> "Place":
        return Place(self.root, f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        return f"{self.root}/{self.key}" if self.key else self.root

    @property
    def is_local(self) -> bool:
        """Whether it is on a local disk."""
        return "://" not in self.root

    @property
    def name(self) -> str:
        """The last part of its path."""
        return str(self).rpartition("/")[2]

    @property
    def path(self) -> Path:
        """Its path on a local disk."""
        assert self.is_local, f"{self} is not on a local disk"
        return Path(str(self))

    def read(self, name: str) -> bytes | None:
        """The content of an object; None if there is none. OSError for a folder in its place."""
        if self._absent():
            return None
        with told(self, name), suppress(FileNotFoundError):
            return bytes(obstore.get(_store(self.root), self._key(name)).bytes())
        if self.is_local and not self._absent(name):  # as containers mount a missing file
            raise OSError(errno.EISDIR, FOLDER, f"{self.path / name}")
        return None

    def write(self, name: str, data: Any) -> None:
        """Write an object in one step, in place of one of that name. `data`: bytes, or the Path of
        a local file.
        """
        with told(self, name):
            obstore.put(_store(self.root), self._key(name), data)
        self.sync(name)

    def create(self, name: str, data: Any) -> bool:
        """As `write`, but only if there is no such object; returns whether it was written."""
        try:
            with told(self, name):
                obstore.put(_store(self.root), self._key(name), data, mode="create")
        except FileExistsError:
            return False
        self.sync(name)
        return True

    def objects(self, prefix: str = "") -> Iterator[Found]:
        """Every object below this place (below its folder `prefix`), by name, at any depth."""
        if self._absent(prefix):
            return
        with told(self, prefix):
            where = self._key(prefix) if prefix else self.key
            batches = list(obstore.list(_store(self.root), where or None))
        start = len(self.key) + 1 if self.key else 0
        found = [item for batch in batches for item in batch]
        for item in sorted(found, key=lambda item: item["path"]):
            name = item["path"][start:]
            yield _found(name, item)

    def folders(self) -> list[str]:
        """Names of the folders directly below this place."""
        names = (found.name for found in self.objects())
        return sorted({name.partition("/")[0] for name in names if "/" in name})

    def head(self, name: str) -> Found | None:
        """What `objects` would say of the object of this name; None if there is none."""
        if self._absent():
            return None
        with told(self, name), suppress(FileNotFoundError):
            item = obstore.head(_store(self.root), self._key(name))
            return _found(name, item)
        return None

    def has(self, name: str) -> bool:
        """Whether there is an object of this name."""
        return self.head(name) is not None

    def delete(self, names: Collection[str]) -> None:
        """Delete objects; those that are gone already are no error."""
        if self.is_local:
            for name in names:
                (self.path / name).unlink(missing_ok=True)
        elif names:
            store, keys = _store(self.root), [self._key(name) for name in names]
            with told(self, ""):
                try:
                    obstore.delete(store, keys)
                except FileNotFoundError:  # S3 says nothing of an object that is gone, Azure does
                    for key in keys:
                        with suppress(FileNotFoundError):
                            obstore.delete(store, key)

    def delete_all(self) -> None:
        """Delete every object below this place, and on a local disk the empty folders too. Never a
        whole root: that is a bucket or a work folder.
        """
        assert self.key, f"{self} is a root"
        self.delete([found.name for found in self.objects()])
        if self.is_local:
            shutil.rmtree(self.path, ignore_errors=True)

    def open(self, name: str) -> pa.NativeFile:
        """An object as a random-access file: only the ranges that are read are transferred."""
        files, folder = self.files()
        with told(self, name):
            return files.open_input_file(f"{folder}/{name}")

    def files(self) -> tuple[pafs.FileSystem, str]:
        """Arrow's file system that has this place, and its path there."""
        files, root = files_of(self.root)
        return files, f"{root}/{self.key}" if self.key else root

    def publish(self, folder: Path, last: str) -> None:
        """Put the files of a local folder here, the file `last` at the end: a reader that finds it
        finds all of them. Files that are here already are replaced.
        """
        files = sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: p.name == last)
        for file in files:
            self.write(file.relative_to(folder).as_posix(), file)

    def fetch(self, cache: Path) -> Path:
        """This folder on the local disk: itself if it is local, else a copy below `cache`, another
        one if anything has changed. Raises FileNotFoundError for an empty folder.
        """
        if self.is_local:
            return self.path
        there = [(f.name, f.size, f.e_tag) for f in self.objects()]
        if not there:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self))
        copy = cache / hashlib.sha256(json.dumps([str(self), there]).encode()).hexdigest()[:12]
        copy /= self.name
        if not copy.is_dir():
            partial = cache / f".partial.{os.urandom(4).hex()}"
            for name, _, _ in there:
                self.save(name, partial / name)
            copy.parent.mkdir(exist_ok=True)
            try:
                os.replace(partial, copy)
            except OSError:  # another process was first
                if not copy.is_dir():
                    raise
                shutil.rmtree(partial)
        return copy

    def save(self, name: str, file: Path) -> None:
        """Copy an object to a local file. Raises FileNotFoundError if there is none."""
        file.parent.mkdir(parents=True, exist_ok=True)
        with told(self, name), open(file, "wb") as stream:
            for block in obstore.get(_store(self.root), self._key(name)).stream(8 << 20):
                stream.write(block)

    def _key(self, name: str) -> str:
        return f"{self.key}/{name}" if self.key else name

    def _absent(self, name: str = "") -> bool:
        """Whether there is no such local folder: reading must not make one."""
        return self.is_local and not (self.path / name).is_dir()

    def sync(self, name: str) -> None:
        """Make a written local file and its folder durable; a bucket is when it answers."""
        if self.is_local:
            file = self.path / name
            for path in (file, file.parent):
                fd = os.open(path, os.O_RDONLY)
                try:
                    os.fsync(fd)
                finally:
                    os.close(fd)


def _found(name: str, item: Any) -> Found:
    # Azure quotes it in one answer and not in another.
    e_tag = (item["e_tag"] or "").strip('"')
    return Found(name, item["size"], item["last_modified"], e_tag)


def place_of(url: str) -> Place:
    """The place of a local path or URL that a user gave. Raises ValueError as `check_url`."""
    check_url(url)
    return Place(url.rstrip("/") if "://" in url else str(Path(url).expanduser().absolute()))


def check_url(url: str) -> None:
    """Raise ValueError if a path or URL is a URL of no bucket, or almost one: as a local folder it
    would be what nobody meant.
    """
    scheme, found, rest = url.partition("://")
    if found and scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ValueError(f"{url!r}: expected a local folder, or a URL that begins with {known}")
    if found and rest[:1] in ("", "/"):
        raise ValueError(f"{url!r}: it names no bucket: write {scheme}://BUCKET/FOLDER")
    scheme, single, rest = url.partition(":/")
    if single and not found and scheme in SCHEMES:
        raise ValueError(
            f"{url!r}: write {scheme}://{rest} for a place in a bucket, ./{url} for a local folder"
        )


@lru_cache(maxsize=32)
def _store(root: str) -> ObjectStore:
    if "://" not in root:
        return LocalStore(root, mkdir=True)
    if root.startswith("az://"):
        azure_account()
    with told(Place(root), ""):
        return from_url(root, retry_config=RETRIES, client_options=CLIENT)


@contextmanager
def told(place: Place, name: str) -> Iterator[None]:
    """Errors of an object store as OSErrors that name the object and say what to do."""
    where = f"{place}/{name}" if name else str(place)
    try:
        yield
    except AlreadyExistsError as error:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), where) from error
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise denied(where) from error
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where) from error
    except BaseError as error:
        if fault := plain_fault(error, where):
            raise fault from error
        text = first_line(error)
        if not place.is_local:
            text = f"the store does not answer ({text}): run the same command again later"
        raise OSError(errno.EIO, text, where) from error


def denied(where: str) -> PermissionError:
    """The error for an object that the store does not let us read or write."""
    return PermissionError(
        errno.EACCES,
        "the store refuses access: check the permissions of this place, and for a bucket the keys "
        "in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or their kin of other clouds)",
        where,
    )


CAUSE = "\N{DOWNWARDS ARROW WITH TIP RIGHTWARDS}"
NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "bucket does not exist")
DENIALS = (
    "403 Forbidden",
    "AccessDenied",
    "ACCESS_DENIED",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "lacked the necessary privileges",
    "169.254.169.254",  # where a library without keys asks the cloud's machine for some
)
FOLDER = "a folder is in the place of a file: remove it"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def plain_fault(error: Exception, where: str) -> OSError | None:
    """The error for a full disk, refused access or a missing bucket, by its text; else None."""
    for number in FULL:
        if getattr(error, "errno", None) == number or os.strerror(number) in str(error):
            todo = "free some space, then run the same command again"
            return OSError(number, f"{os.strerror(number)}: {todo}", where)
    if any(sign in str(error) for sign in DENIALS):
        return denied(where)
    if any(sign in str(error) for sign in NO_BUCKET):
        text = "there is no such bucket: create it, or correct `work`"
        return FileNotFoundError(errno.ENOENT, text, where)
    return None


def first_line(error: Exception) -> str:
    """The first line of an error's text, without colours, and the innermost of the causes that it
    lists (Delta Lake); the rest is for developers of its library.
    """
    lines = re.sub(r"\x1b\[\d+m", "", str(error)).strip().splitlines()
    causes = [line.partition(CAUSE)[2].strip() for line in lines if CAUSE in line]
    return ": ".join([(lines or [type(error).__name__])[0], *causes[-1:]])


def read_json(
    place: Place,
    name: str,
    keys: Collection[str] = (),
    fix: str = "remove it and run its stage",
) -> dict[str, Any] | None:
    """The JSON object that a stage wrote, with at least `keys`; None if there is none.

    Raises ValueError with its place and the `fix` if it is anything else.
    """
    data = place.read(name)
    return None if data is None else parse_json(data, f"{place}/{name}", keys, fix)


def newest_json(
    place: Place, keys: Collection[str] = (), fix: str = "remove it and run its stage"
) -> Iterator[dict[str, Any]]:
    """The JSON objects directly at a place, those written last first, as `read_json` reads them."""
    found = [f for f in place.objects() if f.name.endswith(".json") and "/" not in f.name]
    for item in sorted(found, key=lambda f: (f.modified, f.name), reverse=True):
        value = read_json(place, item.name, keys, fix)
        if value is not None:
            yield value


def parse_json(data: bytes, where: str, keys: Collection[str], fix: str) -> dict[str, Any]:
    """As `read_json`, from the bytes of `where`."""
    try:
        value = json.loads(data)
        if not isinstance(value, dict):
            raise ValueError(f"expected an object, found {type(value).__name__}")
        missing = sorted(set(keys) - set(value))
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
    except ValueError as error:
        raise ValueError(f"{where} is damaged ({error}): {fix}") from error
    return value


def write_json(place: Place, name: str, value: dict[str, Any]) -> dict[str, Any]:
    """Write a JSON object in one step; returns the value as a reader gets it."""
    data = json.dumps(value, indent=1).encode() + b"\n"
    place.write(name, data)
    return json.loads(data)
