"""Whether the engine that serves does what we replayed, and what a drafter is worth there: the
checks of `preflight`, the measurements of `verify` and `methods`. Stages and `reporting` import it,
and it imports `fleet`, `evaluation` and the rooms below them.
"""
