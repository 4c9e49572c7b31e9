"""Where and in which dtype this process and the engine compute, and what fits there."""

import resource
import sys

import torch

from dflash.target_model import resolve_dtype
from jobs.base.config import Config
from serving.server_memory import GIB, free_bytes, weight_bytes
from serving.vllm_server import vllm_runs_on_cpu


def compute_device(cfg: Config) -> str:
    """Where this process computes: cpu or cuda. ValueError for target.device=cuda without one."""
    if cfg.target.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("target.device=cuda, but torch sees no GPU: set target.device=cpu")
    found = "cuda" if torch.cuda.is_available() else "cpu"
    return found if cfg.target.device == "auto" else cfg.target.device


def compute_dtype(cfg: Config) -> torch.dtype:
    """target.dtype, auto resolved for `compute_device`."""
    return resolve_dtype(cfg.target.dtype, compute_device(cfg))


def unfit(cfg: Config, dtype: torch.dtype) -> str:
    """Why the target in this dtype does not fit into what is free here now; empty if it does."""
    needed = weight_bytes(cfg.target_path, dtype.itemsize)
    on_gpu = compute_device(cfg) == "cuda"
    free = torch.cuda.mem_get_info()[0] if on_gpu else free_bytes()
    if needed < free:
        return ""
    return (
        f"the target takes {needed / GIB:.1f} GiB in {str(dtype).removeprefix('torch.')}, "
        f"{free / GIB:.1f} GiB are free on the {'GPU' if on_gpu else 'CPU'}"
    )


def served_dtype(cfg: Config) -> torch.dtype:
    """What the installed vLLM computes in, target.dtype=auto resolved for its device.

    Raises ValueError if vLLM is not installed.
    """
    return resolve_dtype(cfg.target.dtype, "cpu" if vllm_runs_on_cpu() else "cuda")


def dtype_name(cfg: Config) -> str:
    """The name of the dtype that vLLM computes in."""
    return str(served_dtype(cfg)).removeprefix("torch.")


def require_fit(cfg: Config, stage: str) -> None:
    """Raise ValueError unless this process can hold the target itself, in its compute dtype."""
    if why := unfit(cfg, compute_dtype(cfg)):
        raise ValueError(
            f"{stage} runs the target in this process, to compare it with what was served: {why}; "
            "stop other programs, or set target.device=cpu or target.dtype=bfloat16"
        )


def peak_memory(device: torch.device) -> int:
    """Peak memory of this process in bytes: allocated on the GPU if it uses one, else resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
