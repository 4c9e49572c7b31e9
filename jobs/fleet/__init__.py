"""vLLM servers as the configuration describes them: one, or several at a time as the memory allows.
`proof` and the stages that serve import it; it imports `registry` and `base`.
"""
