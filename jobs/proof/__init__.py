"""Whether the serving engine does what replay says, and what a drafter gains there: the checks of
`preflight`, the measurements of `verify` and `methods`. Stages and `reporting` import it; it
imports `fleet`, `evaluation` and the rooms below them.
"""
