"""The Ray cluster a stage runs on: the caller's, a named one, or a local one for this command; and
what its workers take from the node that they are on.
"""

import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import ray

from jobs.base.config import Config
from store.ids import short_hash
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


def node_id() -> str:
    """The node of the cluster that this process is on."""
    return ray.get_runtime_context().get_node_id()


def shares_only_a_bucket(cfg: Config) -> bool:
    """Whether the workers may be on nodes that do not see this machine's folders."""
    return bool(cfg.ray.address) and cfg.is_remote


def on_node(cfg: Config, home: str) -> Config:
    """The settings of a worker whose driver is on the node `home`. On another node, scratch is a
    folder of that node, in its folder for temporary files (TMPDIR).

    Raises ValueError if this node has no target.
    """
    if not shares_only_a_bucket(cfg) or node_id() == home:
        return cfg
    folder = f"flywheel-{os.getuid()}/{short_hash(cfg.work)[:12]}"
    cfg = replace(cfg, scratch=str(Path(tempfile.gettempdir(), folder)))
    if not cfg.target_path.is_dir():
        raise ValueError(
            f"node {ray.util.get_node_ip_address()} has no target in {cfg.target_path}: put it "
            "there on every node, or set target.path to its URL in a bucket"
        )
    return cfg
