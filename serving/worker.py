"""The vLLM worker that `serving.vllm_server` asks for on CPUs: it refuses a drafter it would spoil.

A missing plugin makes no noise by itself, so the check sits in the process that would compute
wrongly, before any weight is read. The same worker can write down what it drafts: vLLM reports how
many drafts it accepted, never which tokens it drafted (serving.drafts reads them).
"""

import json
import os
from typing import Any

import torch
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.cpu_worker import CPUWorker

from serving import cpu_fixes


class CheckedCPUWorker(CPUWorker):
    """`--worker-cls serving.worker.CheckedCPUWorker`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        threads = os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())
        torch.set_num_threads(int(threads))  # one before, see serving.launch

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the weights; with a speculative config, only after cpu_fixes.require()."""
        if self.vllm_config.speculative_config is not None:
            cpu_fixes.require()
        super().load_model(*args, **kwargs)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """What the scheduler asks for after every step; appended to the file FLYWHEEL_DRAFTS."""
        taken = super().take_draft_token_ids()
        path = os.environ.get("FLYWHEEL_DRAFTS")
        if taken is not None and path:
            with open(path, "a") as stream:
                for name, tokens in zip(taken.req_ids, taken.draft_token_ids, strict=True):
                    stream.write(json.dumps([name, tokens]) + "\n")
        return taken
