"""Typed settings: dataclasses to and from YAML, with errors that say what to write instead."""

import contextlib
import dataclasses
import difflib
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import yaml

from store.place import check_url

T = TypeVar("T")
MOVED = {
    f"promote.{old}": f"it is the rule {new} of the gate's file now, see promote.gate"
    for old, new in {
        "min_gain": "gain.min",
        "min_tau": "tau.min",
        "max_domain_loss": "domains.max_loss (a share of tau)",
        "new_shape": "shape.may_change",
        "require_preflight": "preflight.required",
    }.items()
}
"""Settings of earlier releases -> where what they say stands now."""
ODD_NUMBER = re.compile(r"[-+]?0[0-9_]|.*:")


def setting(
    default: Any,
    help: str,
    *,
    minimum: float | None = None,
    path: bool = False,
    local: bool = False,
    execution: bool = False,
) -> Any:
    """A documented dataclass field.

    `minimum` bounds a number from below. `path` marks a path (or a list of them). It is made
    absolute once, while loading: `~` is expanded, and a relative path starts at the folder that the
    command runs in. So Ray workers with another working directory see the same place. `local` marks
    a path that must not be a URL. `execution` marks a setting that changes how or where the work is
    done, not its result. Such a setting is not part of a run's identity.
    """
    metadata = {"help": help, "minimum": minimum, "path": path or local, "local": local}
    metadata["execution"] = execution
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def read_yaml(file: Path) -> dict[str, Any]:
    """The mapping in a YAML file; an empty file is an empty mapping."""
    try:
        values = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError as error:
        raise ValueError(
            f"--config {file}: no such file; `flywheel config > {file}` writes one with every "
            "setting and its meaning"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{file} is not valid YAML: {_yaml_problem(error)}") from error
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ValueError(f"{file}: expected sections such as 'train:', found {_kind(values)}")
    return values


class _Loader(yaml.SafeLoader):
    """A stricter YAML loader. It refuses a key that is there twice (PyYAML drops the first one
    silently), and a number that YAML 1.1 does not read as written (010 is 8, 1:30 is 90).
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):  # any other key is refused later: not a setting
                first = seen.setdefault(key.value, key)
                if first is not key:
                    lines = f"in lines {first.start_mark.line + 1} and {key.start_mark.line + 1}"
                    raise ValueError(f"{key.value!r} stands twice, {lines}: put both together")
        return node

    def compose_scalar_node(self, anchor: Any) -> yaml.ScalarNode:
        node = super().compose_scalar_node(anchor)
        if node.tag.endswith((":int", ":float")) and ODD_NUMBER.match(node.value):
            line = node.start_mark.line + 1
            raise ValueError(
                f"line {line}: YAML reads {node.value} as another number: put text into quotes, "
                "and write numbers without a zero before them and without colons"
            )
        return node


def _yaml_problem(error: Exception) -> str:
    """One line: where, and what the parser expected."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    tab = "; indent with spaces" if "'\\t'" in str(problem) else ""
    return f"line {mark.line + 1}: {problem}{tab}" if mark and problem else str(error)


def parse_overrides(cls: type, overrides: Sequence[str]) -> dict[str, Any]:
    """["train.steps=200"] -> {"train.steps": 200}, each text read as the type of its setting."""
    settings = dict(_settings(cls))
    values = {}
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise ValueError(
                f"{override!r}: settings are given as name=value, e.g. train.steps=200"
            )
        if name not in settings:
            raise ValueError(_unknown(cls, name))
        try:
            values[name] = _read_text(text, settings[name][1])
        except ValueError as error:
            raise ValueError(f"{override!r}: {error}") from error
    return values


def flatten(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values, as YAML has them, by dotted name; refuses names that `cls` does not have."""
    return dict(_flatten(cls, values))


def build(cls: type[T], flat: Mapping[str, Any]) -> T:
    """An instance of the settings class `cls` from values by dotted name, else their defaults."""
    return _build(cls, flat)


def read_over(default: Path, cls: type[T], file: str, name: str) -> T:
    """The values of the YAML file `default`, with those of `file` in their place; "": those alone.
    `name` is the setting that names `file`.

    Raises ValueError for a file that is not there, an unknown name, a wrong type or an impossible
    value; the message names the file and the fix.
    """
    values = flatten(cls, read_yaml(default))
    if not file:
        return build(cls, values)
    if not Path(file).is_file():
        raise ValueError(f"{name} = {file}: no such file; copy {default} there, and edit it")
    given = read_yaml(Path(file))  # its messages name the file
    try:
        return build(cls, values | flatten(cls, given))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def split_identity(settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """One section as (what decides the result, how it is executed), each by field name."""
    identity, execution = {}, {}
    for item in dataclasses.fields(settings):
        part = execution if item.metadata["execution"] else identity
        part[item.name] = getattr(settings, item.name)
    return identity, execution


def to_yaml(settings: Any, as_comments: Collection[str] = (), prefix: str = "") -> str:
    """The settings as YAML that loads back to the same, every key with its meaning above it. Those
    in `as_comments`, by dotted name, are comments.
    """
    lines: list[str] = []
    for item, kind in _fields(type(settings)):
        value, name = getattr(settings, item.name), f"{prefix}{item.name}"
        if dataclasses.is_dataclass(kind):
            summary = (kind.__doc__ or "").splitlines()[0]
            inside = to_yaml(value, as_comments, f"{name}.")
            body = "".join(f"  {line}\n" for line in inside.splitlines())
            lines.append(f"\n# {summary}\n{item.name}:\n{body}")
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=10_000)
            text = text.removesuffix("...\n").strip()
            sign = "# " if name in as_comments else ""
            lines.append(
                f"# {item.metadata['help']} ({_expected(item, kind)})\n{sign}{item.name}: {text}\n"
            )
    return "".join(lines)


def _fields(cls: type) -> list[tuple[dataclasses.Field, Any]]:
    hints = get_type_hints(cls)
    return [(item, hints[item.name]) for item in dataclasses.fields(cls)]


def _settings(cls: type, prefix: str = "") -> Iterator[tuple[str, tuple[dataclasses.Field, Any]]]:
    """(dotted name, (field, type)) of every leaf."""
    for item, kind in _fields(cls):
        if dataclasses.is_dataclass(kind):
            yield from _settings(kind, f"{prefix}{item.name}.")  # pyright: ignore[reportArgumentType]
        else:
            yield f"{prefix}{item.name}", (item, kind)


def _flatten(
    cls: type, values: Mapping[str, Any], prefix: str = "", root: type | None = None
) -> Iterator[tuple[str, Any]]:
    """Nested mapping to (dotted name, value), refusing names that `cls` does not have."""
    kinds = {item.name: kind for item, kind in _fields(cls)}
    root = root or cls
    for key, value in values.items():
        if key not in kinds:
            raise ValueError(_unknown(root, f"{prefix}{key}"))
        kind = kinds[key]
        if not dataclasses.is_dataclass(kind):
            yield f"{prefix}{key}", value
        elif value is None:  # a section header with nothing below it
            continue
        elif isinstance(value, Mapping):
            yield from _flatten(kind, value, f"{prefix}{key}.", root)  # pyright: ignore[reportArgumentType]
        else:
            raise ValueError(
                f"{prefix}{key} = {value!r}: expected a section with settings below it"
            )


def _build(cls: type[T], flat: Mapping[str, Any], prefix: str = "") -> T:
    arguments = {}
    for item, kind in _fields(cls):
        name = f"{prefix}{item.name}"
        if dataclasses.is_dataclass(kind):
            arguments[item.name] = _build(kind, flat, f"{name}.")  # pyright: ignore[reportArgumentType]
        elif name in flat:
            arguments[item.name] = _check(name, flat[name], item, kind)
        else:
            arguments[item.name] = _absolute(name, _default(item), item)
    return cls(**arguments)


def _default(item: dataclasses.Field) -> Any:
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


def _check(name: str, value: Any, item: dataclasses.Field, kind: Any) -> Any:
    """`value` as the type of its setting, or a ValueError that names both."""
    if kind is float and isinstance(value, int | str) and not isinstance(value, bool):
        with contextlib.suppress(ValueError, OverflowError):  # YAML 1.1 reads 5e-3 as a string
            value = float(value)
    if kind == list[float] and isinstance(value, list):
        value = [float(v) if type(v) is int else v for v in value]
    if not _matches(value, kind):
        close = difflib.get_close_matches(str(value), [str(arg) for arg in get_args(kind)], n=1)
        hint = f"; did you mean {close[0]!r}?" if close else _quotes(value, kind)
        raise ValueError(f"{name} = {value!r}: expected {_expected(item, kind)}{hint}")
    if not _is_unicode(value):
        raise ValueError(f"{name} = {value!r}: not UTF-8, which files of results cannot hold")
    minimum = item.metadata["minimum"]
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} = {value!r}: expected {_expected(item, kind)}")
    return _absolute(name, value, item)


def _quotes(value: Any, kind: Any) -> str:
    """A hint for a text that YAML read as another type: no, on, 2024, 2024-01-31 or nothing."""
    if (kind is not str and kind != list[str]) or isinstance(value, dict):
        return ""
    if value is None:
        return '; nothing is written "" or []'
    return "; a text such as no, on, 2024 or 2024-01-31 stands in quotes"


def _is_unicode(value: Any) -> bool:
    """False for a text with bytes that are not UTF-8: Python keeps those as lone surrogates."""
    texts = value if isinstance(value, list) else [value]
    return not any(re.search("[\ud800-\udfff]", text) for text in texts if isinstance(text, str))


def _matches(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_matches(v, get_args(kind)[0]) for v in value)
    if kind is float:
        return type(value) is float and math.isfinite(value)
    return type(value) is kind  # not isinstance: True is not accepted as an integer


def _absolute(name: str, value: Any, item: dataclasses.Field) -> Any:
    if not item.metadata["path"] or not value:
        return value
    if isinstance(value, list):
        return [_absolute(name, part, item) for part in value]
    if "://" in value and item.metadata["local"]:
        raise ValueError(
            f"{name} = {value!r}: it must be a folder on a local disk: copy it there, and "
            "name the copy"
        )
    try:
        check_url(value)
    except ValueError as error:
        raise ValueError(f"{name} = {error}") from error
    if "://" in value:
        return value
    try:
        return str(Path(value).expanduser().absolute())
    except RuntimeError as error:  # ~NAME of a user that this machine does not have
        raise ValueError(f"{name} = {value!r}: {error}") from error


def _read_text(text: str, kind: Any) -> Any:
    """A command-line text as a value; `_check` tests its type later."""
    if kind is str or get_origin(kind) is Literal:
        return text
    if get_origin(kind) is list and not text.startswith("["):
        return [_read_text(part, get_args(kind)[0]) for part in text.split(",")] if text else []
    try:
        return yaml.load(text, _Loader)
    except (yaml.YAMLError, RecursionError):
        return text


def _expected(item: dataclasses.Field, kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " | ".join(str(arg) for arg in get_args(kind))
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    text = f"list of {names[get_args(kind)[0]]}s" if get_origin(kind) is list else names[kind]
    minimum = item.metadata["minimum"]
    return text if minimum is None else f"{text} >= {minimum:g}"


def _kind(value: Any) -> str:
    return {"list": "a list", "str": "text"}.get(type(value).__name__, type(value).__name__)


def _unknown(cls: type, name: str) -> str:
    known = [setting_name for setting_name, _ in _settings(cls)]
    sections = [item.name for item, kind in _fields(cls) if dataclasses.is_dataclass(kind)]
    if name in sections:
        inside = ", ".join(key for key in known if key.startswith(f"{name}."))
        return f"{name!r} is a section: set one of {inside}"
    leaf = name.rpartition(".")[2]
    if moved := MOVED.get(name):
        return f"unknown setting {name!r}: {moved}"
    close = difflib.get_close_matches(name, [*known, *sections], n=3) or [
        key for key in known if key.rpartition(".")[2] == leaf
    ]
    others = getattr(cls, "OTHERS", "`flywheel config` lists them all")
    hint = f"did you mean {' or '.join(close[:3])}?" if close else others
    return f"unknown setting {name!r}: {hint}"
