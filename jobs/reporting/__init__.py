"""The HTML page about a drafter: its facts, tables and pictures. Only stages import it; it imports
`evaluation`, `tracking`, `dataset` and `base`.
"""
