"""MLflow as we use it: a client that turns every failure into one message, and training runs.
`registry`, `training` and `reporting` import it; it imports `base`.
"""
