"""Which samples of traffic/ are worth learning from. Only the stage `select` imports it; it imports
`dataset` and `base`.
"""
