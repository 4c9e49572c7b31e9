"""Between the two config.json formats of DFlash drafters: z-lab's (ours) and speculators'.

Tensors are the same in both; what differs is where options live and what ids mean. Facts were
read in speculators 0.9.0 (models/dflash) and vLLM 0.32 (transformers_utils/configs/speculators).

- Layer ids: speculators counts residual streams (0 = embeddings), z-lab layer outputs: z-lab's id
  is the other's minus 1.
- Causality: speculators trains full layers bidirectional and sliding ones causal, unless
  `sliding_window_non_causal`. vLLM reads that flag as the causality of *all* layers, and a missing
  one as true. So full layers beside a false flag are served causal though trained bidirectional;
  what is read here is what was trained, what is written here is served as it was trained.
"""

from typing import Any

SPECULATORS_VERSION = "0.9.0"
SLIDING = "sliding_attention"
NOT_IN_LAYERS = (
    "architectures",
    "block_size",
    "num_target_layers",
    "dflash_config",
    "is_causal",
    "draft_vocab_size",
)
"""Keys of z-lab's config that are no part of speculators' `transformer_layer_config`."""

Json = dict[str, Any]


def is_speculators(raw: Json) -> bool:
    """Whether a config.json is in speculators' format."""
    return "speculators_model_type" in raw


def to_zlab(raw: Json, num_target_layers: int) -> Json:
    """The z-lab config of a speculators one; options that neither has pass through by name.

    `num_target_layers` is not in the format. Raises ValueError for another algorithm than dflash, a
    missing key, or sliding layers that do not say whether they are causal.
    """
    if raw["speculators_model_type"] != "dflash":
        raise ValueError(
            f"speculators_model_type is {raw['speculators_model_type']!r}: only dflash is read"
        )
    needed = ("transformer_layer_config", "aux_hidden_state_layer_ids", "mask_token_id")
    missing = [name for name in needed if raw.get(name) is None]
    if missing:
        raise ValueError(f"not a complete speculators drafter: it lacks {', '.join(missing)}")
    layers = raw["transformer_layer_config"]
    sliding = SLIDING in (layers.get("layer_types") or [])
    if sliding and raw.get("sliding_window_non_causal") is None:
        raise ValueError(
            "sliding layers without sliding_window_non_causal: speculators trains them causal, "
            "vLLM serves them bidirectional; write the one that is meant into config.json"
        )
    passed = ("block_size", "draft_vocab_size", "target_hidden_size", "sample_from_anchor")
    return {
        **layers,
        **{name: raw[name] for name in passed if name in raw},
        "num_target_layers": num_target_layers,
        "is_causal": sliding and not raw["sliding_window_non_causal"],
        "dflash_config": {
            "mask_token_id": raw["mask_token_id"],
            "target_layer_ids": [i - 1 for i in raw["aux_hidden_state_layer_ids"]],
        },
    }


def to_speculators(raw: Json, verifier: str, verifier_architectures: list[str]) -> Json:
    """The speculators config of a z-lab one that `DrafterConfig.to_json` wrote.

    verifier: name or path of the target. Raises ValueError for full causal layers, which
    speculators cannot say.
    """
    sliding = SLIDING in raw["layer_types"]
    if raw["is_causal"] and not sliding:
        raise ValueError(
            "full causal layers: speculators' format has no key for them (its full layers are "
            "bidirectional); keep z-lab's format"
        )
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": raw["block_size"] - 1}
            ],
            "verifier": {"name_or_path": verifier, "architectures": verifier_architectures},
        },
        "transformer_layer_config": {k: v for k, v in raw.items() if k not in NOT_IN_LAYERS},
        "dtype": raw["dtype"],
        "draft_vocab_size": raw.get("draft_vocab_size", raw["vocab_size"]),
        "block_size": raw["block_size"],
        "aux_hidden_state_layer_ids": [i + 1 for i in raw["dflash_config"]["target_layer_ids"]],
        "mask_token_id": raw["dflash_config"]["mask_token_id"],
        "sliding_window_non_causal": not raw["is_causal"],
        "sample_from_anchor": False,
    }
