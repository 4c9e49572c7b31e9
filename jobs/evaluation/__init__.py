"""Replay as a measurement: which drafters are compared on which samples, confidence intervals, and
regression sets. `proof`, `promotion` and `reporting` import it; it imports `training`,
`harvesting`, `registry`, `dataset` and `base`.
"""
