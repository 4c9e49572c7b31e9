"""One in-process vLLM with a drafter: plants one fault after another, writes down what it drafted.

    python -m tests.serving.faulty_engine TARGET DRAFTER PROMPTS.json OUT_FOLDER DTYPE

Each fault changes vLLM's own objects in the running engine and is undone afterwards, so that one
start serves all. OUT_FOLDER/<fault>.json holds the answers, <fault>.jsonl the drafts.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch

MAX_TOKENS = 40
OTHER_MASK, OTHER_THETA = 5, 1e6


@contextmanager
def healthy(runner: Any) -> Iterator[None]:
    yield


@contextmanager
def taps(runner: Any) -> Iterator[None]:
    model = runner.model
    layers = model.model.aux_hidden_state_layers
    model.set_aux_hidden_state_layers(tuple(i + 1 for i in layers))
    yield
    model.set_aux_hidden_state_layers(layers)


@contextmanager
def key_norm(runner: Any) -> Iterator[None]:
    """What vLLM 0.32 does on a CPU without our plugin."""
    from vllm import _custom_ops as ops

    with mock.patch.object(ops, "rms_norm", ops.rms_norm.original):  # pyright: ignore
        yield


@contextmanager
def _rope(runner: Any, neox: bool, theta: float) -> Iterator[None]:
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    model = runner.drafter.model.model
    attention = [layer.self_attn for layer in model.layers]
    old, cache = attention[0].rotary_emb, model._rope_cos_sin_cache
    parameters = {"rope_type": "default", "rope_theta": theta}
    with set_current_vllm_config(runner.vllm_config):
        new = get_rope(old.head_size, 512, is_neox_style=neox, rope_parameters=parameters)
    for one in attention:
        one.rotary_emb = new
    model._rope_cos_sin_cache, model._rope_is_neox = new.cos_sin_cache, neox
    yield
    for one in attention:
        one.rotary_emb = old
    model._rope_cos_sin_cache, model._rope_is_neox = cache, True


def theta(runner: Any):
    return _rope(runner, True, OTHER_THETA)


def interleaved(runner: Any):
    return _rope(runner, False, 10000.0)


@contextmanager
def mask(runner: Any) -> Iterator[None]:
    with mock.patch.object(runner.drafter, "parallel_drafting_token_id", OTHER_MASK):
        yield


@contextmanager
def causal(runner: Any) -> Iterator[None]:
    with mock.patch.object(runner.drafter, "dflash_causal", True):
        yield


@contextmanager
def _inputs(change: Callable[[dict[str, Any]], None]) -> Iterator[None]:
    from vllm.v1.spec_decode import dflash

    real = dflash._copy_and_expand_dflash_inputs  # pyright: ignore[reportPrivateImportUsage]

    def changed(**tensors: Any) -> None:
        real(**tensors)
        change(tensors)

    with mock.patch.object(dflash, "_copy_and_expand_dflash_inputs", changed):
        yield


def position(runner: Any):
    return _inputs(lambda tensors: tensors["out_query_positions_ptr"].add_(1))


def slots(runner: Any):
    return _inputs(lambda tensors: tensors["out_token_indices_ptr"].sub_(1))


@contextmanager
def _spoilt(norm: Any) -> Iterator[None]:
    # A norm, because a linear layer's kernel reads a packed copy of its weight on a CPU.
    saved = norm.weight.data.clone()
    norm.weight.data.mul_(torch.linspace(0.2, 3.0, len(saved)))
    yield
    norm.weight.data.copy_(saved)


def weights(runner: Any):
    """One tensor differs from the file, as if it were missing there."""
    return _spoilt(runner.drafter.model.model.layers[1].post_attention_layernorm)


def target(runner: Any):
    return _spoilt(runner.model.model.layers[3].post_attention_layernorm)


@contextmanager
def lenient(runner: Any) -> Iterator[None]:
    """Drafts that are not the target's choice are accepted, too, unless far from it."""
    real = runner.rejection_sampler.forward

    def forward(metadata: Any, draft_probs: Any, logits: torch.Tensor, *rest: Any) -> Any:
        logits[metadata.target_logits_indices.long(), metadata.draft_token_ids.long()] += 20.0
        return real(metadata, draft_probs, logits, *rest)

    with mock.patch.object(runner.rejection_sampler, "forward", forward):
        yield


FAULTS: list[Callable[[Any], Any]] = [
    healthy,
    taps,
    key_norm,
    theta,
    interleaved,
    mask,
    causal,
    position,
    slots,
    weights,
    target,
]


def main(target_folder: str, drafter: str, prompts: str, out: str, dtype: str) -> None:
    """Start the engine once and answer all prompts under every fault."""
    from vllm import LLM

    engine = LLM(
        target_folder,
        dtype=cast(Any, dtype),
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=512,
        max_num_seqs=16,
        worker_cls="serving.worker.CheckedCPUWorker",
        per_request_spec_decode_metrics="detailed",
        speculative_config={"method": "dflash", "model": drafter, "num_speculative_tokens": 3},
    )
    runner = engine.collective_rpc(lambda worker: worker.model_runner)[0]
    asked = json.loads(Path(prompts).read_text())
    for fault in FAULTS:
        with fault(runner):
            answer(engine, asked["short"], Path(out) / fault.__name__)
    answer(engine, asked["new"], Path(out) / "strict")
    with lenient(runner):
        answer(engine, asked["new"], Path(out) / "lenient")
    answer(engine, asked["long"], Path(out) / "cold")
    answer(engine, asked["long"], Path(out) / "warm")
    for attention in runner.drafter.model.model._attn_layers:
        attention.kv_cache.zero_()
    answer(engine, asked["long"], Path(out) / "stale")


def answer(engine: Any, prompts: list[list[int]], path: Path) -> None:
    """Greedy answers to `path`.json, the worker's drafts to `path`.jsonl."""
    from vllm import SamplingParams

    os.environ["FLYWHEEL_DRAFTS"] = str(path.with_suffix(".jsonl"))
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False),
        use_tqdm=False,
    )
    rows = [
        {
            "request_id": output.request_id,
            "prompt_ids": list(output.prompt_token_ids),
            "output_ids": list(output.outputs[0].token_ids),
            "spec": output.outputs[0].spec_decode_metrics.to_dict(),
            "cached": output.num_cached_tokens,
        }
        for output in outputs
    ]
    path.with_suffix(".json").write_text(json.dumps(rows))


if __name__ == "__main__":
    os.environ |= {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    main(*sys.argv[1:])
