"""Upkeep of a work folder: what may be removed, what the feature cache keeps, and former layouts.
The stages gc, cache and migrate import it.
"""
