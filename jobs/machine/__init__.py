"""The checks of `flywheel doctor`: installed software, and resources of this machine. Only that
stage imports it; it imports `fleet` (how many servers fit) and `base`.
"""
