"""Conversion between the two config.json formats of DFlash drafters: z-lab's (ours), speculators'.

The tensors are the same in both. What differs is where options stand and how layer ids count. The
facts below are from the source of speculators 0.9.0 (models/dflash) and of vLLM 0.32
(transformers_utils/configs/speculators).

- Layer ids: speculators counts residual streams (0 = embeddings), z-lab counts layer outputs. So
  z-lab's id is speculators' id minus 1.
- Causality: speculators trains full layers bidirectional. It trains sliding layers causal, unless
  `sliding_window_non_causal` is true. vLLM applies this flag to *all* layers, and takes a missing
  one for true. So beside a false flag, it serves full layers as causal although they were trained
  bidirectional. Reading here gives what was trained. Writing here makes vLLM serve what was
  trained.
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
"""Keys of z-lab's config that are not part of speculators' `transformer_layer_config`."""

HEAD_KEYS = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Sizes of DFlash 2's head."""
KINDS = {"dflash": (), "dflash2": HEAD_KEYS}
"""Algorithms of speculators that are read and written, with the keys that only they have."""

Json = dict[str, Any]


def is_speculators(raw: Json) -> bool:
    """Whether a config.json is in speculators' format."""
    return "speculators_model_type" in raw


def to_zlab(raw: Json, num_target_layers: int) -> Json:
    """The z-lab config of a speculators one; unknown options of the layers are copied by name.

    num_target_layers: the target's number of layers, which speculators' format does not contain.
    Raises ValueError for another algorithm than dflash and dflash2, a missing key, or sliding
    layers that do not say whether they are causal.
    """
    kind = raw["speculators_model_type"]
    if kind not in KINDS:
        raise ValueError(f"speculators_model_type is {kind!r}: only {', '.join(KINDS)} are read")
    needed = ("transformer_layer_config", "aux_hidden_state_layer_ids", "mask_token_id")
    needed += KINDS[kind]
    missing = [name for name in needed if raw.get(name) is None]
    if missing:
        raise ValueError(f"not a complete speculators drafter: it lacks {', '.join(missing)}")
    layers = raw["transformer_layer_config"]
    sliding = SLIDING in (layers.get("layer_types") or [])
    if sliding and raw.get("sliding_window_non_causal") is None:
        raise ValueError(
            "sliding layers without sliding_window_non_causal: speculators trains them causal, "
            "vLLM serves them bidirectional; set it in config.json to what was trained"
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
            **{name: raw[name] for name in KINDS[kind]},
        },
    }


def to_speculators(raw: Json, verifier: str, verifier_architectures: list[str]) -> Json:
    """The speculators config of a z-lab one that `DrafterConfig.to_json` wrote.

    verifier: name or path of the target. Raises ValueError for full causal layers, which
    speculators' format cannot express.
    """
    sliding = SLIDING in raw["layer_types"]
    if raw["is_causal"] and not sliding:
        raise ValueError(
            "full causal layers: speculators' format has no key for them (its full layers are "
            "bidirectional); keep z-lab's format"
        )
    dflash = raw["dflash_config"]
    kind = "dflash2" if "selector_rank" in dflash else "dflash"
    return {
        "architectures": raw["architectures"],
        "speculators_model_type": kind,
        **{name: dflash[name] for name in KINDS[kind]},
        "speculators_version": SPECULATORS_VERSION,
        "speculators_config": {
            "algorithm": kind,
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
        "aux_hidden_state_layer_ids": [i + 1 for i in dflash["target_layer_ids"]],
        "mask_token_id": dflash["mask_token_id"],
        "sliding_window_non_causal": not raw["is_causal"],
        "sample_from_anchor": False,
    }
