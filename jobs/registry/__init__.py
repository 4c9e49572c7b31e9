"""Drafter versions in MLflow: registered, found by alias or number, checked whenever they are
opened. The rooms above it (`fleet`, `evaluation`, `promotion`) import it; it imports `tracking` and
`base`.
"""
