"""When and how the loop turns again: which samples are new, the policy of triggers, drift, and the
settings of one window. `pipelines` imports it; no stage does. It imports everything below it.
"""
