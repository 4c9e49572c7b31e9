"""A champion that is for another target than the one that is served now."""

from dflash.identity import legacy_target_id, target_id
from jobs.base.config import Config
from jobs.promotion.champion_moves import promoting
from jobs.registry.versions import CHAMPION, Version, opened
from store import promotions

ACTION = "incompatible"
"""The action of its row in promotions/. It does not move the champion: `previous` may fit, or the
former target may come back."""


def foreign_champion(cfg: Config) -> Version | None:
    """The champion, if it is for another target, tokenizer or template; else None."""
    registry = opened(cfg)
    champion = registry.current(CHAMPION) if registry else None
    ours = (target_id(cfg.target_path), legacy_target_id(cfg.target_path))
    return None if champion is None or champion.compat["target_id"] in ours else champion


def mark(cfg: Config, champion: Version) -> str:
    """Record once in promotions/ that the champion cannot draft for this target; returns why."""
    reason = (
        f"version {champion.number} is for target {champion.compat['target_id']}, "
        f"{cfg.target_path} is {target_id(cfg.target_path)}"
    )
    known = promotions.read(cfg.table("promotions"))
    if not any((row["action"], row["reason"]) == (ACTION, reason) for row in known):
        with promoting(cfg) as moves:
            moves.record(ACTION, champion, champion.number, champion.sha256, reason, None)
    return reason
