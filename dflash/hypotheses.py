"""What an engine or a config can get wrong about a drafter, each as a change to our own forward.

A hypothesis turns a drafter into one that computes what the fault would compute, with the same
weights. Code that takes a drafter (replay, drafting) then runs under the fault.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from dflash.drafter_config import DrafterConfig
from dflash.model import Drafter, drafter_of


def _same(drafter: Drafter) -> Drafter:
    return drafter


@dataclass(frozen=True)
class Hypothesis:
    """One assumption changed: `change` gives another drafter, `tap_shift` other features."""

    name: str
    cause: str
    remedy: str
    change: Callable[[Drafter], Drafter]
    tap_shift: int = 0


AS_CONFIGURED = Hypothesis("as configured", "", "", _same)
TAPS = "target_layer_ids count from 0: id i is the output of layer i (speculators' id - 1)"
ROPE = "write rope_theta and plain neox RoPE, as trained, into config.json"
MASK = "write the mask_token_id of the training into dflash_config"
ATTENTION = "write is_causal and the window as trained; serve with a backend that honours them"
ENGINE = "upgrade or patch the engine (`flywheel doctor`); do not serve this drafter with it"


def hypotheses(
    cfg: DrafterConfig, thetas: Sequence[float], mask_ids: Sequence[int]
) -> list[Hypothesis]:
    """All hypotheses that are tried. thetas, mask_ids: values that may have been used instead.

    Shifts that would move a tap out of the target's layers are left out.
    """
    others = {
        "rope_theta": [theta for theta in dict.fromkeys(thetas) if theta != cfg.rope_theta],
        "mask_token_id": [i for i in dict.fromkeys(mask_ids) if i != cfg.mask_token_id],
        "is_causal": [not cfg.is_causal],
        "sliding_window": [0] if cfg.sliding_window else [],
    }
    return [
        *_taps(cfg),
        *(_value(name, value) for name, values in others.items() for value in values),
        *ENGINES,
    ]


def _taps(cfg: DrafterConfig) -> list[Hypothesis]:
    return [
        Hypothesis(
            f"taps {shift:+d}", f"features are read one layer too {when}", TAPS, _same, shift
        )
        for shift, when in ((1, "late"), (-1, "early"))
        if all(0 <= tap + shift < cfg.num_target_layers for tap in cfg.target_layer_ids)
    ]


def _value(name: str, value: float) -> Hypothesis:
    """Another value of one key of the config."""
    remedy = {"rope_theta": ROPE, "mask_token_id": MASK}.get(name, ATTENTION)
    cause = f"it is computed with {name} = {value:g}"
    if name == "is_causal":
        cause = f"slots of a block {'do not see' if value else 'see'} the slots after them"

    def change(drafter: Drafter) -> Drafter:
        return drafter_of(replace(drafter.cfg, **{name: value}), drafter.state_dict())

    return Hypothesis(f"{name} {value:g}", cause, remedy, change)


def _with(drafter: Drafter, **methods: Callable) -> Drafter:
    """The same weights (not copied), with some methods replaced."""
    other = drafter_of(drafter.cfg, drafter.state_dict())
    other.__dict__.update(methods)
    return other


def _position(shift: int) -> Callable[[Drafter], Drafter]:
    # RoPE depends on differences only, so moving the context back equals moving the block forward.
    return lambda drafter: _with(
        drafter, context=lambda features, start=0: drafter.context(features, start - shift)
    )


def _short_context(drafter: Drafter) -> Drafter:
    # An anchor one place earlier hides the last context token. The context moves too, so that
    # distances stay the same.
    return _with(
        drafter,
        context=lambda features, start=0: drafter.context(features, start - 1),
        forward=lambda context, embeds, anchors: drafter(context, embeds, anchors - 1),
    )


def _slots_shifted(drafter: Drafter) -> Drafter:
    return _with(
        drafter,
        forward=lambda context, embeds, anchors: drafter(context, embeds, anchors).roll(1, dims=2),
    )


def _first_key_norm(drafter: Drafter) -> Drafter:
    """Only for the context's keys: the block's own keys are normalised inside each layer."""
    broken = _with(drafter)
    for layer in broken.layers:
        layer.self_attn.k_norm = drafter.layers[0].self_attn.k_norm
    return _with(drafter, context=broken.context)


def _interleaved(drafter: Drafter) -> Drafter:
    """Rotating neighbouring pairs equals rotating halves after reordering the rows of q and k."""
    dim = drafter.cfg.head_dim
    order = torch.arange(dim).view(-1, 2).T.flatten()  # evens, then odds
    state = drafter.state_dict()
    for name, tensor in state.items():
        if name.rpartition(".")[0].endswith(("q_proj", "k_proj", "q_norm", "k_norm")):
            state[name] = tensor.unflatten(0, (-1, dim))[:, order].flatten(0, 1)
    return drafter_of(drafter.cfg, state)


ENGINES = [
    Hypothesis("rope interleaved", "RoPE pairs neighbours, not halves", ROPE, _interleaved),
    Hypothesis(
        "key norm",
        "context keys of all layers are normalised with the first layer's weights (vLLM's CPU "
        "fault, or CUDA before its #46761)",
        ENGINE,
        _first_key_norm,
    ),
    Hypothesis("position +1", "the block sits one position too late", ENGINE, _position(1)),
    Hypothesis("position -1", "the block sits one position too early", ENGINE, _position(-1)),
    Hypothesis("short context", "the last context token is not seen", ENGINE, _short_context),
    Hypothesis("slots shifted", "slot k is read for draft k + 1", ENGINE, _slots_shifted),
]
