"""What can be wrong between a drafter and whoever runs it, each as a change to our own forward.

A hypothesis turns a drafter into one that computes what the fault would compute, with the same
weights: whatever reads a drafter (replay, drafting) then runs under the fault.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dflash.config import DrafterConfig
from dflash.model import Drafter


@dataclass(frozen=True)
class Hypothesis:
    """One assumption changed: `change` gives another drafter, `tap_shift` other features."""

    name: str
    cause: str
    remedy: str
    change: Callable[[Drafter], Drafter] = lambda drafter: drafter
    tap_shift: int = 0


AS_CONFIGURED = Hypothesis("as configured", "", "")


def hypotheses(
    cfg: DrafterConfig, thetas: Sequence[float], mask_ids: Sequence[int]
) -> list[Hypothesis]:
    """Everything that is tried. `thetas`, `mask_ids`: the values others would have used instead.

    Taps that would leave the target are not in it.
    """
    taps = "target_layer_ids count from 0: id i is the output of layer i (speculators' id - 1)"
    rope = "write rope_theta and plain neox RoPE, as trained, into config.json"
    mask = "write the mask_token_id of the training into dflash_config"
    engine = "upgrade or patch the engine (`flywheel doctor`); do not serve this drafter with it"
    return [
        *(
            Hypothesis(
                f"taps {shift:+d}", f"features are read one layer too {when}", taps, tap_shift=shift
            )
            for shift, when in ((1, "late"), (-1, "early"))
            if all(0 <= tap + shift < cfg.num_target_layers for tap in cfg.target_layer_ids)
        ),
        *(
            Hypothesis(f"rope theta {t:g}", f"RoPE of base {t:g}", rope, _theta(t))
            for t in dict.fromkeys(thetas)
            if t != cfg.rope_theta
        ),
        Hypothesis("rope interleaved", "RoPE pairs neighbours, not halves", rope, _interleaved),
        Hypothesis(
            "key norm",
            "context keys of all layers are normalised with the first layer's weights "
            "(vLLM's CPU fault, or CUDA before its #46761)",
            engine,
            _first_key_norm,
        ),
        *(
            Hypothesis(f"mask token {m}", f"masked slots hold token {m}", mask, _mask(m))
            for m in dict.fromkeys(mask_ids)
            if m != cfg.mask_token_id
        ),
        Hypothesis("position +1", "the block sits one position too late", engine, _position(1)),
        Hypothesis("position -1", "the block sits one position too early", engine, _position(-1)),
        Hypothesis("short context", "the last context token is not seen", engine, _short_context),
        Hypothesis("slots shifted", "slot k is read for draft k + 1", engine, _slots_shifted),
        Hypothesis(
            "causal block",
            "slots of a block see only the slots before them",
            "write is_causal: false into config.json, and serve with a backend that honours it",
            _causal,
        ),
    ]


def _rebuilt(drafter: Drafter, cfg: DrafterConfig | None = None, **methods: Callable) -> Drafter:
    """The same weights (not copied) under another config, with some methods replaced."""
    with torch.device("meta"):
        other = Drafter(cfg or drafter.cfg)
    other.load_state_dict(drafter.state_dict(), assign=True)
    other.__dict__.update(methods)
    return other


def _theta(theta: float) -> Callable[[Drafter], Drafter]:
    return lambda drafter: _rebuilt(drafter, replace(drafter.cfg, rope_theta=theta))


def _mask(token: int) -> Callable[[Drafter], Drafter]:
    return lambda drafter: _rebuilt(drafter, replace(drafter.cfg, mask_token_id=token))


def _position(shift: int) -> Callable[[Drafter], Drafter]:
    # RoPE sees differences only: moving the context back is moving the block on.
    return lambda drafter: _rebuilt(
        drafter, context=lambda features, start=0: drafter.context(features, start - shift)
    )


def _short_context(drafter: Drafter) -> Drafter:
    # The mask hides what is at or after the anchor; both sides move, so distances stay.
    return _rebuilt(
        drafter,
        context=lambda features, start=0: drafter.context(features, start - 1),
        forward=lambda context, embeds, anchors: drafter(context, embeds, anchors - 1),
    )


def _slots_shifted(drafter: Drafter) -> Drafter:
    return _rebuilt(
        drafter,
        forward=lambda context, embeds, anchors: drafter(context, embeds, anchors).roll(1, dims=2),
    )


def _first_key_norm(drafter: Drafter) -> Drafter:
    """Only the context's keys: the block's own are normalised by an ordinary layer."""
    broken = _rebuilt(drafter)
    for layer in broken.layers:
        layer.self_attn.k_norm = drafter.layers[0].self_attn.k_norm
    return _rebuilt(drafter, context=broken.context)


def _interleaved(drafter: Drafter) -> Drafter:
    """Rotating neighbours is rotating halves with the rows of q and k reordered."""
    dim = drafter.cfg.head_dim
    order = torch.arange(dim).view(-1, 2).T.flatten()  # evens, then odds
    other = _rebuilt(drafter)
    state = other.state_dict()
    for name, tensor in state.items():
        if name.rpartition(".")[0].endswith(("q_proj", "k_proj", "q_norm", "k_norm")):
            state[name] = tensor.unflatten(0, (-1, dim))[:, order].flatten(0, 1)
    other.load_state_dict(state, assign=True)
    return other


def _causal(drafter: Drafter) -> Drafter:
    other = _rebuilt(drafter)
    for layer in other.layers:
        attention = layer.self_attn
        attention.__dict__["forward"] = _causal_forward(attention.forward)
    return other


def _causal_forward(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def causal(x: Tensor, rope: Tensor, context: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        slots = x.shape[1]  # of all blocks; the mask already parts these
        earlier = torch.ones(slots, slots, dtype=torch.bool, device=x.device).tril()
        mask = mask.clone()
        mask[..., -slots:] &= earlier
        return forward(x, rope, context, mask)

    return causal
