"""The vLLM worker that `serving.server` asks for on CPUs: it refuses a drafter it would spoil.

A missing plugin makes no noise by itself, so the check sits in the process that would compute
wrongly, before any weight is read.
"""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from serving import cpu_fixes


class CheckedCPUWorker(CPUWorker):
    """`--worker-cls serving.worker.CheckedCPUWorker`."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the weights; with a speculative config, only after cpu_fixes.require()."""
        if self.vllm_config.speculative_config is not None:
            cpu_fixes.require()
        super().load_model(*args, **kwargs)
