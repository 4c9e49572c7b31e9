"""The sections of the configuration, a file per subject; jobs/base/config.py composes them.

Only dataclasses of settings: a default, its meaning, and what is refused.
"""
