"""The stages of the flywheel, one Ray job each: `flywheel <stage>` or `python -m jobs.<stage>`."""
