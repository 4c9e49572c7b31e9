"""How the champion comes to the replicas that serve."""

from dataclasses import dataclass
from typing import Literal

from jobs.base.settings import setting


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """A champion goes to one replica, is compared with the others, then goes to all or back."""

    replicas: list[str] = setting(
        [],
        "URLs of the replicas; empty: those of rollout.dns, else those that `flywheel fleet up` "
        "started",
    )
    dns: str = setting("", "NAME:PORT whose every address is a replica, such as a headless service")
    token_file: str = setting(
        "",
        "file with the replicas' token; empty: FLYWHEEL_TOKEN of the environment, else the token "
        "of `flywheel fleet up`",
        local=True,
    )
    max_loss: float = setting(
        0.05, "share of the tokens per round that the canary may lose", minimum=0.001
    )
    max_slice_loss: float = setting(
        0.1, "the same in one domain, where there is less traffic", minimum=0.001
    )
    min_share: float = setting(
        0.05, "share of the traffic from which on a domain is judged on its own", minimum=0.001
    )
    max_slowdown: float = setting(
        0.2, "share of the tokens per second of an answer that the canary may lose", minimum=0.001
    )
    max_delay: float = setting(
        0.5, "share by which the canary's first token may come later", minimum=0.001
    )
    min_first: float = setting(
        0.1,
        "share of first drafts accepted below which a drafter goes back, whatever the others do; "
        "to advance, it must be above",
        minimum=0.001,
    )
    error: float = setting(0.05, "chance of a wrong roll-back, and of an advance", minimum=1e-6)
    window: int = setting(
        300, "seconds: answers are compared if both sides answered in the same window", minimum=1
    )
    wait: int = setting(
        1800, "seconds a command waits for a decision; the next command goes on from there"
    )
    watch: bool = setting(False, "stay and follow the registry, until Ctrl-C")
    poll: float = setting(10.0, "seconds between two looks at the replicas", minimum=0.05)
    timeout: float = setting(
        120.0, "seconds that a replica may take for a load or an activation", minimum=0.1
    )
    restart_wait: int = setting(
        900, "seconds to wait for a restart of a replica of `flywheel fleet`"
    )
    floor: str = setting(
        "none",
        "where replicas fall back to if the champion cannot be served and no earlier one can: a "
        "version number, or none (no drafter)",
    )
    freeze: Literal["", "on", "off"] = setting(
        "", "on: from now on nobody changes a replica, until off"
    )
    reason: str = setting("no reason given", "why it is frozen; recorded")

    def __post_init__(self) -> None:
        if self.floor != "none" and not self.floor.isdigit():
            raise ValueError(
                f"rollout.floor = {self.floor!r}: expected the number of a version, or none"
            )
        if self.error >= 0.5:
            raise ValueError(f"rollout.error = {self.error}: expected a chance such as 0.05")
        if self.min_first >= 1:
            raise ValueError(f"rollout.min_first = {self.min_first}: expected a share below 1")
        for url in self.replicas:
            if "@" in url:  # sent in place of the token, and told with each message
                raise ValueError(
                    f"rollout.replicas: the URL of {url.rpartition('@')[2]!r} has a user or a "
                    "password: remove them; a replica takes the token of rollout.token_file"
                )
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"rollout.replicas: {url!r} is no URL such as http://HOST:8000")
        if self.dns and not self.dns.rpartition(":")[2].isdigit():
            raise ValueError(f"rollout.dns = {self.dns!r}: expected NAME:PORT")
