"""The triggers of the policy: what each sees now, its limit, and whether it fires."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from dflash.identity import target_id
from jobs.base.config import Config
from jobs.base.console import print_table, short_name
from jobs.dataset.slices import largest
from jobs.registry.versions import CHAMPION, Version, opened
from jobs.retraining.drift import Found, Mixed, find_drift, find_mix, served_requests
from jobs.retraining.new_samples import New, new_since
from jobs.retraining.policy import Drift, Policy, Schedule, Tokens
from store import windows
from store.ids import drafter_version
from store.windows import Window


@dataclass(frozen=True, slots=True)
class Trigger:
    """What one trigger sees. A row that only explains, such as the mix, never fires."""

    name: str
    value: str
    limit: str
    fires: bool
    why: str


def look(cfg: Config, policy: Policy) -> list[Trigger]:
    """Every trigger, from the tables and the registry as they are now. Writes nothing."""
    identity, known = target_id(cfg.target_path), windows.read(cfg.table("windows"))
    registry = opened(cfg)
    champion = registry.current(CHAMPION) if registry else None
    new = new_since(cfg, identity, known)
    found = [unfinished(known), schedule(policy.schedule, known, new, datetime.now(UTC))]
    found += tokens(policy.tokens, new)
    if champion is not None:
        requests = served_requests(cfg, identity, drafter_version(champion.sha256), policy.drift)
        found += drift(policy.drift, find_drift(requests, policy.drift))
        found += mixed(find_mix(requests, policy.drift))
    found.append(target(policy.target.changed, identity, champion))
    return found


def unfinished(known: Sequence[Window]) -> Trigger:
    """A window that was interrupted is finished first, whatever the policy says."""
    one = windows.unfinished([*known])
    if one is None:
        return Trigger("unfinished", "none", "none", False, "every window has ended")
    why = f"window {one.number} is {one.state}: {one.whole['reason']}"
    return Trigger("unfinished", f"window {one.number}", "none", True, why)


def schedule(limits: Schedule, known: Sequence[Window], new: New, now: datetime) -> Trigger:
    """Time since the last window began, if there is anything new."""
    name, limit = "schedule", f"{limits.hours:g} h"
    if not limits.hours:
        return Trigger(name, "-", "never", False, "schedule.hours is 0")
    fires, value, why = True, "-", "there was no window yet"
    if known:
        hours = (now - known[-1].whole["started_at"]).total_seconds() / 3600
        value, fires = f"{hours:.1f} h", hours >= limits.hours
        why = f"since window {known[-1].number} began"
        if hours < 0:  # a clock was set back: waiting until it catches up may take years
            fires, why = True, f"window {known[-1].number} is dated in the future"
    if fires and not new.total:
        fires, why = False, f"{why}, but no sample is new"
    return Trigger(name, value, limit, fires, why)


def tokens(limits: Tokens, new: New) -> list[Trigger]:
    """New answer tokens of each domain; the smaller of many are not listed unless they fire."""
    shown = largest(new.tokens)
    found = []
    for name, count in new.tokens.items():
        limit = limits.limit(name)
        fires = bool(limit) and count >= limit
        if not fires and name not in shown:
            continue
        why = f"answer tokens of {new.samples[name]} new samples"
        shown_limit = f"{limit:,}" if limit else "never"
        found.append(
            Trigger(f"tokens of {short_name(name)}", f"{count:,}", shown_limit, fires, why)
        )
    return found or [Trigger("tokens", "0", f"{limits.min:,}", False, "no sample is new")]


def drift(limits: Drift, found: Sequence[Found]) -> list[Trigger]:
    """Domains that lost tokens per round under the champion."""
    if not limits.fall:
        return [Trigger("drift", "-", "never", False, "drift.fall is 0")]
    limit = f"-{limits.fall:.1%}"
    rows = [_drifted(one, limits, limit) for one in found if one.change is not None]
    few = [one for one in found if one.change is None]
    if few or not found:
        most = max((one.requests for one in few), default=0)
        why = f"a domain needs {2 * limits.short} requests drafted by the champion"
        value = f"{len(few)} domains, at most {most} requests"
        rows.append(Trigger("drift of others", value, limit, False, why))
    return rows


def _drifted(one: Found, limits: Drift, limit: str) -> Trigger:
    assert one.change is not None
    why = f"tokens per round of the newest {limits.short} requests against those before, "
    why += f"between {one.low:+.1%} and {one.high:+.1%}"
    if one.fires and one.change > -limits.fall:
        why += f"; it has fired and is not back above -{limits.recovered:.1%}"
    name = f"drift of {short_name(one.slice)}"
    return Trigger(name, f"{one.change:+.1%}", limit, one.fires, why)


def mixed(found: Mixed | None) -> list[Trigger]:
    """How much of a change over all domains is their mix: shown, so that nobody takes it for
    drift. It fires nothing: a drafter that fits every domain as before needs no training.
    """
    if found is None:
        return []
    moved = sorted(
        found.shares, key=lambda name: -abs(found.shares[name][1] - found.shares[name][0])
    )
    told = [
        f"{short_name(name)} {found.shares[name][0]:.0%} -> {found.shares[name][1]:.0%}"
        for name in moved[:3]
    ]
    why = f"by other shares of the domains ({', '.join(told)}); within them {found.within:+.1%}"
    return [Trigger("mix", f"{found.mix:+.1%}", "-", False, why)]


def target(wanted: bool, identity: str, champion: Version | None) -> Trigger:
    """The identity of a target covers its tokenizer and template."""
    if champion is None:
        return Trigger("target", identity, "-", False, "there is no champion")
    theirs = champion.compat["target_id"]
    if theirs == identity:
        return Trigger("target", identity, theirs, False, "the champion is for this target")
    why = (
        f"champion {champion.number} is for another target, tokenizer or template; its fleet falls "
        "back, and `flywheel retrain` has this target answer the prompts of the former one"
    )
    if not wanted:
        why += " (target.changed is false)"
    return Trigger("target", identity, theirs, wanted, why)


def show(found: Sequence[Trigger]) -> None:
    """Print what every trigger sees."""
    rows = [[t.name, t.value, t.limit, "fires" if t.fires else "no", t.why] for t in found]
    print_table("Triggers", ["trigger", "value", "limit", "", "why"], rows, most=None)


def as_rows(found: Sequence[Trigger]) -> list[dict[str, Any]]:
    """For the JSON line."""
    return [asdict(one) for one in found]
