"""The target's features, computed by vLLM: the harvest backend `vllm`.

vLLM's kernels and quantisation produce what the served drafter will see, and its batching needs no
padding. Same interface and result as dflash.target_model.Target.features.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from dflash.drafter_config import check_taps
from dflash.target_model import Features, open_tensors, read_target_config

FLUSH_STEPS = 8  # most extra engine steps after the last answer, whose states come a step later


class Extractor:
    """One in-process vLLM engine that reads the taps it was made for.

    taps: z-lab layer ids (id i = output of layer i); they are fixed when the engine starts.
    gpu_share: share of a GPU's memory that it may take, if vLLM runs on one.
    Raises ValueError for a folder without a model or for taps it does not have.
    """

    def __init__(
        self,
        target: Path | str,
        taps: Sequence[int],
        dtype: torch.dtype,
        kv_cache_gib: int = 2,
        max_batch_tokens: int = 8192,
        gpu_share: float = 1.0,
    ) -> None:
        config = read_target_config(target)
        check_taps(tuple(taps), config["num_hidden_layers"])
        self.taps = list(taps)
        self.dtype = dtype
        norm = open_tensors(target)("model.norm.weight")
        if norm is None:
            raise ValueError(f"{target} has no tensor model.norm.weight: unknown layout")
        self.norm, self.epsilon = norm.float(), config["rms_norm_eps"]
        # vLLM counts layer boundaries, 0 being the embedding. The last is before the final norm.
        boundaries = [tap + 1 for tap in self.taps] + [config["num_hidden_layers"]]
        self.llm = _engine(target, boundaries, dtype, kv_cache_gib, max_batch_tokens, gpu_share)

    def features(self, batch: Sequence[Sequence[int]], taps: Sequence[int]) -> list[Features]:
        """One teacher-forced pass: for each sequence its tap outputs and last hidden states.

        Raises ValueError for other taps than the engine's.
        """
        from vllm import SamplingParams

        if list(taps) != self.taps:
            raise ValueError(f"this engine reads taps {self.taps}, not {list(taps)}: make another")
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(ids)} for ids in batch],
            SamplingParams(temperature=0.0, max_tokens=1, detokenize=False),
            use_tqdm=False,
        )
        paths = [(output.kv_transfer_params or {})["hidden_states_path"] for output in outputs]
        return [self._split(one) for one in self._take(paths)]

    def room(self) -> int:
        """The most tokens that a sequence may have in `features`: it is sent as a prompt, and one
        more token is generated.
        """
        return self.llm.llm_engine.model_config.max_model_len - 1

    def _take(self, paths: list[str]) -> list[Tensor]:
        from serving.connector import FINISHED

        for _ in range(FLUSH_STEPS):
            if all(path in FINISHED for path in paths):
                break
            self.llm.llm_engine.step()
        return [FINISHED.pop(path) for path in paths]

    def _split(self, states_TLH: Tensor) -> Features:
        before_norm = states_TLH[:, -1].float()
        scale = (before_norm.square().mean(-1, keepdim=True) + self.epsilon).rsqrt()
        last = (before_norm * scale * self.norm).to(self.dtype)
        return Features(taps=states_TLH[:, :-1].flatten(1), last=last)


def _engine(
    target: Path | str,
    boundaries: list[int],
    dtype: torch.dtype,
    kv_cache_gib: int,
    max_batch_tokens: int,
    gpu_share: float,
):  # -> vllm.LLM, which is imported only after its environment is set
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(kv_cache_gib)
    for name, value in (
        ("VLLM_CPU_OMP_THREADS_BIND", "nobind"),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("HF_HUB_OFFLINE", "1"),
        ("VLLM_LOGGING_LEVEL", "ERROR"),
    ):
        os.environ.setdefault(name, value)
    from vllm import LLM

    # vLLM takes most of a GPU, which another engine may share.
    memory: dict[str, Any] = {"gpu_memory_utilization": 0.9 * gpu_share} if gpu_share < 1 else {}
    hf_config = {"eagle_aux_hidden_state_layer_ids": boundaries}
    return LLM(
        str(target),
        dtype=cast(Any, str(dtype).removeprefix("torch.")),
        enforce_eager=True,
        skip_tokenizer_init=True,
        **memory,
        enable_prefix_caching=False,  # cached positions have no states (vLLM #44485)
        max_num_batched_tokens=max_batch_tokens,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": hf_config},
        },
        kv_transfer_config={
            "kv_connector": "InMemoryConnector",
            "kv_connector_module_path": "serving.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"use_synchronization_lock": False},
        },
    )
