"""The two trainers of bench/train.py, one process each, and the task that both read."""
