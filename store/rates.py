"""Whether a rate is surely above a limit. A stage stops for that, but not for one bad record."""

import math

SURE = 0.01


def exceeds(bad: int, total: int, limit: float) -> bool:
    """Whether `bad` of `total` shows that the true rate is above `limit`: if it were `limit`, so
    many would be found with a probability below SURE (one-sided binomial test).
    """
    if total == 0 or bad / total <= limit:
        return False
    return _chance_of_at_least(bad, total, limit) < SURE


def _chance_of_at_least(count: int, total: int, rate: float) -> float:
    if rate <= 0.0:
        return 0.0  # count > 0 here
    term = math.exp(
        math.lgamma(total + 1)
        - math.lgamma(count + 1)
        - math.lgamma(total - count + 1)
        + count * math.log(rate)
        + (total - count) * math.log1p(-rate)
    )
    chance = 0.0
    for k in range(count, total + 1):  # above the mean the terms only fall
        chance += term
        if term <= chance * 1e-12:
            break
        term *= (total - k) / (k + 1) * rate / (1 - rate)
    return chance
