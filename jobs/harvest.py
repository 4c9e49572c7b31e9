"""flywheel harvest [harvest.backend=vllm] [harvest.workers=2]

<work>/selection -> <work>/features/<cache key>: one teacher-forced pass of the target over prompt +
output of every selected sample that has no features yet. Each Ray actor holds one target and writes
its own shards; the table <work>/feature_index lists them as they are finished. Token ids go to the
actors and small rows come back; features never travel through Ray. A sample that fails a check is
recorded with the reason in <work>/set_aside. It is not tried again, except with another backend or
dtype where the reason may lie in those.
"""

from typing import Any

from jobs.base.cli import run_as_module
from jobs.base.config import Config
from jobs.harvesting.missing_features import harvest_missing, show


def run(cfg: Config) -> dict[str, Any]:
    """Harvest every selected sample that has no features; returns the summary.

    Samples that fail a check are set aside. Raises ValueError without a selection, and if the share
    set aside is significantly above harvest.max_reject_rate; all other features are listed first.
    """
    done = harvest_missing(cfg)
    show(done)
    done.check_rate(cfg.harvest.max_reject_rate)
    return {"stage": "harvest", **done.summary}


if __name__ == "__main__":
    run_as_module("harvest")
