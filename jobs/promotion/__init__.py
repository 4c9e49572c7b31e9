"""How a champion changes: the rules of the gate, the only code that moves its alias, and where a
drafter comes from. Only the stages `promote`, `rollback` and `history` import it; it imports
`proof`, `evaluation`, `registry` and the rooms below them.
"""
