"""Features of samples: the engines and Ray actors that compute them, and the checks that each
sample must pass. Stages and `evaluation` (regression sets are harvested, too) import it; it imports
`dataset` and `base`.
"""
