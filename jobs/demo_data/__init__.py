"""The simulated clients of the demo and what they ask. Only the stage `traffic` and the benchmarks
import it; it imports nothing of ours.
"""
