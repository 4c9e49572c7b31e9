"""The training of a drafter: which run it is, what it reads, its loop on Ray Train, its states and
its plan. The stage `train` imports it, and `evaluation`, which asks what samples a run has trained
on. It imports `registry`, `tracking`, `dataset` and `base`.
"""
