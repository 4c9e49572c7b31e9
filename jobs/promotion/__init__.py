"""How a champion changes: the rules of the gate, and the only code that moves its alias. Only the
stages `promote` and `rollback` import it; it imports `evaluation`, `registry` and the rooms below
them.
"""
