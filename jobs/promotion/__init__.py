"""How a champion changes: the rules of the gate, and the one way in which aliases move. Only the
stages `promote` and `rollback` import it; it imports `evaluation`, `registry` and the rooms below
them.
"""
