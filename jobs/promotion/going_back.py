"""Back to an earlier champion: the code of `flywheel rollback` and of a roll-out that failed."""

from dflash.identity import legacy_target_id, target_id
from jobs.base.config import Config
from jobs.promotion.champion_moves import Moves
from jobs.registry.versions import Registry, Version
from store import promotions


class NothingEarlier(ValueError):
    """No former champion can be used."""


def go_back(cfg: Config, moves: Moves, champion: Version, reason: str) -> tuple[Version, list[str]]:
    """Mark the champion bad and make the latest usable former one champion; returns that, and why
    later ones cannot be used. Raises NothingEarlier, with nothing changed, if none can.
    """
    moves.complete_history(champion)
    target, skipped = _earlier(cfg, moves.registry, champion)
    # Before the alias moves: if the rollback is interrupted, the version is refused already.
    moves.registry.mark_bad(champion, reason)
    moves.move("rollback", champion, target, reason, {"skipped": skipped})
    return target, skipped


def _earlier(cfg: Config, registry: Registry, champion: Version) -> tuple[Version, list[str]]:
    """The latest former champion that can be used, and why later ones cannot."""
    records = [
        r for r in promotions.read(cfg.table("promotions")) if r["action"] in promotions.MOVES
    ]
    numbers = dict.fromkeys(record["to_version"] for record in reversed(records))
    skipped = []
    for number in numbers:
        if number == champion.number:
            continue
        version = registry.get(number)
        fault = "it was deleted" if version is None else _fault(cfg, registry, version, champion)
        if version is not None and fault is None:
            return version, skipped
        skipped.append(f"version {number}: {fault}")
    tried = "; ".join(skipped) or f"champion {champion.number} is the first one"
    raise NothingEarlier(f"nothing to roll back to: {tried}")


def _fault(cfg: Config, registry: Registry, version: Version, champion: Version) -> str | None:
    if version.bad:
        return f"it was rolled back itself ({version.bad})"
    try:
        folder = registry.open(version)
    except ValueError as error:
        return str(error)
    theirs = version.compat["target_id"]
    if theirs == champion.compat["target_id"]:
        return None
    if theirs != _former_id(cfg):
        return "it is for another target"
    if _replaced(cfg, version):
        return None
    return (
        f"it carries {theirs}, a former id of this target that did not cover all bytes of the "
        f"weights: `flywheel evaluate {folder}`, then `flywheel promote {folder}` tags it with "
        "today's, even if the gate refuses it"
    )


def _former_id(cfg: Config) -> str:
    """The id that the target had before ids covered all bytes of the weights. Empty where the
    target folder is missing: a rollback does not need it.
    """
    try:
        return legacy_target_id(cfg.target_path)
    except ValueError:
        return ""


def _replaced(cfg: Config, version: Version) -> bool:
    """Whether a recorded evaluation replayed this version as baseline on the target with today's
    id. Then it works on exactly these weights, although its own id does not cover all their bytes.
    """
    identity = target_id(cfg.target_path)
    found = [r["evidence"] or {} for r in promotions.read(cfg.table("promotions"))]
    return any(
        (one.get("baseline") or {}).get("drafter_sha256") == version.sha256
        and one.get("target_id") == identity
        for one in found
    )
