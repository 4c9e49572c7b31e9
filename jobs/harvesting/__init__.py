"""Features of samples: the engines and Ray actors that make them, and the checks that each sample
must pass. `evaluation` imports it (regression sets are harvested, too); it imports `dataset` and
`base`.
"""
