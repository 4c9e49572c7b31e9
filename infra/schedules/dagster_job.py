"""A window each night with Dagster: `dagster dev -f dagster_job.py` beside .venv and my.yaml.

A run that failed is tried again once, and continues where it stopped.
"""

import subprocess

import dagster as dg

COMMAND = ".venv/bin/flywheel retrain --config my.yaml"


@dg.asset(retry_policy=dg.RetryPolicy(max_retries=1))
def champion() -> None:
    """The drafter that the fleet serves."""
    subprocess.run(COMMAND.split(), check=True)


retrain = dg.ScheduleDefinition(name="retrain", target=[champion], cron_schedule="0 2 * * *")
defs = dg.Definitions(assets=[champion], schedules=[retrain])
