"""`flywheel STAGE --submit URL ...`: the same command as a job of a Ray cluster, with this code."""

import asyncio
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from ray.job_submission import JobStatus, JobSubmissionClient

from jobs.base.config import Config
from jobs.base.console import console
from store.place import first_line

ROOT = Path(__file__).parents[2]
PACKAGES = ("dflash", "jobs", "pipelines", "serving", "sql", "store")
SUFFIXES = (".py", ".sql", ".html", ".css", ".yaml")
"""Of the files that are sent; those of package-data in pyproject.toml."""
SETTINGS = "flywheel.yaml"
POLL_SECONDS = 1.0


def submit(address: str, module: str, words: Sequence[str], config: str | None, cfg: Config) -> int:
    """Run `python -m module words` on the cluster whose dashboard is at `address`, with the code of
    this process, and print its log; returns its exit code.

    Raises ValueError if what it makes would not outlast the job, and ConnectionError if no cluster
    answers.
    """
    if not cfg.is_remote:
        raise ValueError(
            f"work={cfg.work} is a folder of this machine: with --submit, set work= to a place in "
            "a bucket, which all nodes see"
        )
    if not cfg.mlflow.uri:
        raise ValueError(
            "mlflow.uri is empty, and a file of the job would end with it: with --submit, set it "
            "to an MLflow server (docs/how-to/team-registry.md)"
        )
    command = ["python", "-m", module, *(["--config", SETTINGS] if config else []), *words]
    command.append("ray.address=auto")
    try:
        client = JobSubmissionClient(address)
    except (ConnectionError, RuntimeError) as error:
        why = first_line(error)
        raise ConnectionError(f"--submit {address}: no Ray dashboard answers: {why}") from error
    with TemporaryDirectory() as folder:
        copy_code(Path(folder))
        if config:
            shutil.copy(config, Path(folder, SETTINGS))
        job = client.submit_job(
            entrypoint=shlex.join(command),
            runtime_env={"working_dir": folder},
            entrypoint_num_cpus=cfg.ray.submit_cpus,
            entrypoint_num_gpus=cfg.ray.submit_gpus,
        )
    console.print(f"job {job}: {shlex.join(command)}", markup=False)
    try:
        return _followed(client, job)
    except KeyboardInterrupt:
        stop = f"ray job stop --address {address} {job}"
        console.print(f"the job goes on without this command; `{stop}` ends it", markup=False)
        raise


def copy_code(folder: Path) -> None:
    """Copy the code to an empty folder, and say how much it is and what stays here.

    No list of ignored files has a say in it: Ray drops what .gitignore names without a word.
    """
    sent, left = list[Path](), list[Path]()
    for path in _files():
        (sent if path.suffix in SUFFIXES else left).append(path.relative_to(ROOT))
    for path in sent:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    size = sum((ROOT / path).stat().st_size for path in sent)
    counts = Counter(path.parts[0] for path in sent)
    parts = ", ".join(f"{name}/ {counts[name]}" for name in PACKAGES)
    stays = f"; not sent: {', '.join(map(str, left))}" if left else ""
    told = f"sending {len(sent)} files of code, {size / 2**20:.1f} MiB ({parts}){stays}"
    console.print(told, markup=False)


def _files() -> Iterator[Path]:
    """All files of the packages but compiled ones."""
    for name in PACKAGES:
        for path in sorted((ROOT / name).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield path


def _followed(client: JobSubmissionClient, job: str) -> int:
    """Print the log of a job until it has ended; returns its exit code."""
    try:
        asyncio.run(_tail(client, job))
    except (OSError, RuntimeError) as error:
        console.print(f"the log of the job broke off ({error}); waiting for its end", markup=False)
    while not (info := client.get_job_info(job)).status.is_terminal():
        time.sleep(POLL_SECONDS)  # the end of its log is not the end of a job
    if info.status == JobStatus.SUCCEEDED:
        return 0
    console.print(f"job {job}: {info.status}: {info.message}", markup=False)
    return info.driver_exit_code or 2


async def _tail(client: JobSubmissionClient, job: str) -> None:
    async for lines in client.tail_job_logs(job):
        print(lines, end="", flush=True)
