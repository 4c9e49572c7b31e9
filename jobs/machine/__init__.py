"""What `flywheel doctor` looks at: what is installed, and what this machine has. Only that stage
imports it; it imports `fleet` (how many servers fit) and `base`.
"""
