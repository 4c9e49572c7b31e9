"""The HTML page about a drafter: its facts, tables and pictures. Only stages import it. It imports
`proof`, `evaluation`, `tracking`, `dataset` and `base`.
"""
