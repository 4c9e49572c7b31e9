"""A window each night with Airflow 3: put this file into its folder of DAGs.

A run that failed is tried again once, and continues where it stopped.
"""

from datetime import datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

with DAG(
    "flywheel",
    schedule="0 2 * * *",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,
):
    BashOperator(
        task_id="retrain",
        bash_command="cd $HOME/flywheel && .venv/bin/flywheel retrain --config my.yaml",
        append_env=True,
        retries=1,
        execution_timeout=timedelta(hours=23),
    )
