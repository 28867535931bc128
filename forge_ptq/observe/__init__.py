"""What a run shows and leaves behind: metric names, live view, summary.json, summary.png.

Light: rich and matplotlib are imported where they are used; nothing here knows of actors.
"""
