"""What the whole run shares: one small Ray cluster."""

import pytest


@pytest.fixture(scope="session")
def ray_cluster():
    """A local Ray of 2 logical CPUs, started once. Jobs find it and leave it running."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20)
    yield
    ray.shutdown()
