"""Training loops, one per file and read top to bottom: ``offline`` (from data) and ``online`` (from samples).

``run`` runs them in order, ``context`` holds their common parts, and ``engine`` wraps DeepSpeed.
"""
