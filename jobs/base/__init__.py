"""What every stage uses: the settings, the command line, the console, the Ray cluster, and
facts about the target that follow from its folder. Every room and every stage may import it; it
imports `serving`, `store` and `dflash`, and no other room.
"""
