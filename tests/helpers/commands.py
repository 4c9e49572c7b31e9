"""Commands that stand in files which no test can run: they are parsed as `flywheel` does."""

import re
import shlex
from pathlib import Path

from jobs.base.cli import _parser, _settings
from jobs.base.config import Config, load

COMMAND = re.compile(r"(?<![\w$-])flywheel +([a-z][^\n`&|;<>#\"]*)")


def commands(text: str) -> list[list[str]]:
    """The words of every `flywheel ...` in a text, each up to what ends a command."""
    found = COMMAND.finditer(text.replace("\\\n", " "))
    return [shlex.split(match[1]) for match in found]


def checked(words: list[str], config: Path | None = None) -> Config:
    """The settings of a command; `config` stands for the file that it names.

    Fails as `flywheel` would: SystemExit for an unknown stage, ValueError for a wrong setting.
    """
    args = _parser().parse_intermixed_args(words)
    assert (args.config is None) == (config is None), f"{words}: with or without --config?"
    return load(config, _settings(args.stage, args.settings))
