"""vLLM servers as the configuration describes them: one, or as many at a time as memory allows.
`proof` and the stages that serve import it; it imports `registry` and `base`.
"""
