"""The training of a drafter: which run it is, what it reads, its loop on Ray Train, its states and
its plan. Only the stage `train` imports it; it imports `tracking`, `dataset` and `base`.
"""
