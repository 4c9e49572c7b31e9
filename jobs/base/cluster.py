"""The Ray cluster a stage runs on: the caller's, a named one, or a local one for this command."""

import logging
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray

from jobs.base.config import Config
from store.place import first_line


@contextmanager
def cluster(cfg: Config) -> Iterator[None]:
    """Connect to Ray for the block. An existing session is used and stays open afterwards.

    A local cluster has no dashboard and ends with the block. Raises ConnectionError (an OSError)
    when `ray.address` names a cluster that does not answer.
    """
    if ray.is_initialized():
        yield
        return
    if cfg.ray.address:
        _connect(cfg.ray.address)
    else:
        # Ray makes a token for its own sockets and warns at every start: nothing for a user to do.
        auth = logging.getLogger("ray._private.authentication.authentication_token_setup")
        auth.setLevel(logging.ERROR)
        cpus = cfg.ray.num_cpus or None
        ray.init(
            num_cpus=cpus,
            include_dashboard=False,
            logging_level=logging.WARNING,
            log_to_driver=False,  # errors and progress come through the driver
        )
    try:
        yield
    finally:
        ray.shutdown()


def _connect(address: str) -> None:
    try:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if port.isdigit():  # otherwise Ray finds its address; to one that is gone it takes minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
        ray.init(address=address)
    except OSError as error:
        raise ConnectionError(
            f"ray.address {address}: no cluster answers ({first_line(error)}): start its head, or "
            "correct ray.address, then run the same command again. A head that found "
            "~/.ray/auth_token when it started needs RAY_AUTH_MODE=token here, too"
        ) from error


def cpus_each(nodes: Sequence[Mapping[str, Any]], workers: int, gpus: int = 0) -> int:
    """The most CPUs that each of `workers` can have, with `gpus` GPUs each, so that all workers fit
    on these nodes (`ray.nodes()`). 0 if they do not fit: Ray would wait for ever.

    Example: four nodes of 4 CPUs give two workers 4, not 8.
    """
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    most = int(max((node.get("CPU", 0) for node in alive), default=0))

    def places(node: Mapping[str, float], cpus: int) -> int:
        room = int(node.get("CPU", 0)) // cpus
        return min(room, int(node.get("GPU", 0)) // gpus) if gpus else room

    fitting = (c for c in range(most, 0, -1) if sum(places(node, c) for node in alive) >= workers)
    return next(fitting, 0)
