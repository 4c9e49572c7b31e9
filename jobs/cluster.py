"""The Ray cluster a stage runs on: the caller's, a named one, or a local one for this command."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from jobs.config import Config


@contextmanager
def cluster(cfg: Config) -> Iterator[None]:
    """Connect to Ray; leave it as it was found (a session that was there already stays).

    A local cluster has no dashboard and ends with the block. Raises ConnectionError (an OSError)
    when `ray.address` names a cluster that does not answer.
    """
    if ray.is_initialized():
        yield
        return
    if cfg.ray.address:
        ray.init(address=cfg.ray.address)
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
