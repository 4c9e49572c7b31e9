"""MLflow as we use it: one client whose failures are one message, and the runs of training.
`registry`, `training` and `reporting` import it; it imports `base`.
"""
