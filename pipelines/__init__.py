"""Compositions of jobs: nothing but order, idempotence and triggers."""
