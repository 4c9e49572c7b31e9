"""Jinja2 as our pages use it: every value is escaped, and numbers are written in one way."""

from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from jobs.base.console import short_name, visible


def templates(*packages: str) -> Environment:
    """Jinja2 over the templates of these packages. Every value that they show is escaped."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, "") for package in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_plain,
    )
    environment.filters |= {"interval": interval, "signed": signed, "short": short_name}
    return environment


def _plain(value: Any) -> Any:
    """A value as it is put into the page: control and text-direction characters are escaped."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return visible(value, lines=True)
    return value


def interval(ci: list[float] | None, digits: int = 3) -> str:
    """[1, 2.5] -> "1.000 to 2.500"; None -> "too few conversations"."""
    if ci is None:
        return "too few conversations"
    low, high = ci
    return f"{low:.{digits}f} to {high:.{digits}f}"


def signed(value: float, digits: int = 3) -> str:
    """0.25 -> "+0.250"."""
    return f"{value:+.{digits}f}"
