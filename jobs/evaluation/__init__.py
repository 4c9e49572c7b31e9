"""Replay as a measurement: which drafters are compared on what, intervals, and regression sets.
`proof`, `promotion` and `reporting` import it; it imports `harvesting`, `registry`, `dataset`,
`base`.
"""
