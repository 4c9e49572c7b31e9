"""The page of `flywheel ui`: what a work folder says, read without writing to it. Only the stage ui
imports it. It imports the rooms below: `retraining`, `reconciling`, `reporting`, `registry`.
"""
