"""Checks before a server starts, each with one clear message; and what a server's log says."""

import errno
import os
import re
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dflash.checkpoint import read_config
from dflash.drafter_config import DrafterConfig
from dflash.target_model import read_target_config

# What the log says when a phase of the start begins -> what to tell the user meanwhile.
PHASES = {
    "Initializing a V1 LLM engine": "starting the engine",
    "Starting to load model": "loading weights",
    "KV cache size": "warming up",
    "Starting vLLM server": "opening the port",
}
SHORTEST_TOKEN = 16
_PREFIX = re.compile(r"^(\(\w[^)]*pid=\d+\)\s*)?([A-Z]+ [\d-]+ [\d:.]+ \[[^]]*\]\s*)?")
_ERROR = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Exit)|\S+: error): .+")
# These lines only report that a child failed; the child's own error stands above them.
_REPORTS = (
    "Engine core initialization failed",
    "WorkerProc initialization failed",
    "EngineCore encountered an issue",
)


def check_drafter(
    drafter: Path | str | None, target: Path | str, k: Sequence[int], max_model_len: int
) -> tuple[int, ...]:
    """K by batch size for this drafter on this target: `k`, or block_size - 1 if that is empty.

    Empty without a drafter. Raises ValueError for k without a drafter, a drafter that was made for
    another target's shape, a K that its block does not hold, several K for DFlash 2, or fewer
    positions than the longest request needs. vLLM would crash on the wrong shape, and stop drafting
    for whole batches where positions run out.
    """
    if drafter is None:
        if k:
            raise ValueError(f"k = {list(k)} needs a drafter: name its folder, or leave k empty")
        return ()
    config = read_config(drafter)
    _check_shapes(drafter, config, read_target_config(target))
    k = tuple(k) or (config.num_drafts,)
    if not all(0 <= one <= config.num_drafts for one in k):
        raise ValueError(
            f"k = {list(k)}: drafter {drafter} has blocks of {config.block_size}, "
            f"so k lies in 0..{config.num_drafts} (empty: {config.num_drafts}; 0: no drafts)"
        )
    if not any(k):
        raise ValueError(f"k = {list(k)} drafts nothing at any batch size: name no drafter")
    if config.is_dflash2 and len(set(k) - {0}) > 1:
        raise ValueError(
            f"k = {list(k)}: vLLM builds DFlash 2's convolutions for one size of block; another "
            f"K would be drafted wrongly: give one, such as [{max(k)}]"
        )
    largest = config.max_position_embeddings - max(k)
    if largest < max_model_len:
        raise ValueError(
            f"drafter {drafter}: max_position_embeddings {config.max_position_embeddings} < "
            f"served length {max_model_len} + k {max(k)}: lower max_model_len to {largest}, "
            "or train a drafter with more positions"
        )
    return k


def check_head(drafter: Path | str | None, on_cpu: bool) -> None:
    """Raise ValueError for a drafter whose head this machine's vLLM does not run.

    vLLM 0.32 has DFlash 2 in its V2 runner alone, which needs Triton. On a CPU there is none, and
    the V1 runner refuses the drafter in the middle of the start.
    """
    if drafter is not None and on_cpu and read_config(drafter).is_dflash2:
        raise ValueError(
            f"drafter {drafter} has DFlash 2's head, which vLLM runs on a GPU only (its V2 runner; "
            "on a CPU there is V1): serve it on a GPU, or serve a plain DFlash drafter here, such "
            "as the train.base that it was made from"
        )


def _check_shapes(drafter: Path | str, config: DrafterConfig, target: dict[str, Any]) -> None:
    pairs = {
        "hidden_size": (config.hidden_size, target["hidden_size"]),
        "vocab_size": (config.vocab_size, target["vocab_size"]),
        "layers": (config.num_target_layers, target["num_hidden_layers"]),
    }
    unlike = [f"{name} {a} != {b}" for name, (a, b) in pairs.items() if a != b]
    if unlike:
        raise ValueError(
            f"drafter {drafter} was made for another target: {', '.join(unlike)} of this target"
        )


def free_port(host: str, port: int) -> int:
    """`port` if it can be opened on `host`, a free one for 0. Raises ValueError if it is taken."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ValueError(
                    f"port {port} on {host} is in use: stop what listens there, or choose "
                    "another port (0 takes a free one)"
                ) from error
            raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        return probe.getsockname()[1]


def read_token(file: str | os.PathLike[str]) -> bytes:
    """The token in a file, without white space around it.

    Raises ValueError if no file is named, it cannot be read, or holds no token that is safe and can
    be sent in a header.
    """
    if not os.fspath(file):
        raise ValueError("FLYWHEEL_TOKEN_FILE is not set: name a file with a secret token")
    try:
        token = Path(file).read_bytes().strip()
    except OSError as error:
        raise ValueError(f"token file {file}: {error.strerror}") from error
    check_token(token, str(file))
    return token


def check_token(token: bytes, where: str) -> None:
    """Raise ValueError, without the token, for one that the other side could not send or take."""
    if not token.isascii() or len(token.split()) != 1:
        raise ValueError(f"{where} holds no token: expected one word of printable ASCII characters")
    if len(token) < SHORTEST_TOKEN:
        raise ValueError(
            f"the token of {where} has fewer than {SHORTEST_TOKEN} characters: "
            "`openssl rand -hex 32` makes a good one"
        )


def phase(lines: Iterable[str]) -> str:
    """What a starting vLLM is doing, by the last phase its log names."""
    found = "importing vLLM"
    for line in lines:
        found = next((text for mark, text in PHASES.items() if mark in line), found)
    return found


def last_error(lines: Iterable[str]) -> str | None:
    """The last error a vLLM log states, without time stamps and without reports about children.

    For an error of pydantic, the next line says what is wrong, so it is appended.
    """
    found, joins_next = None, False
    for line in lines:
        text = _PREFIX.sub("", line.strip()).strip()
        if joins_next:
            found = f"{found}: {text}"
        is_error = bool(_ERROR.match(text)) and not any(report in text for report in _REPORTS)
        found = text if is_error else found
        joins_next = is_error and "ValidationError: 1 validation error" in text
    return found
