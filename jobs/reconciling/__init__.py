"""How the fleet comes to draft with the champion: what is measured, what is decided, what is done.
Only the stages `rollout` and `rollback` import it; it imports `promotion`, `reporting`, `registry`
and the rooms below them.
"""
