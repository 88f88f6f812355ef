"""Training loops, one per file and read top to bottom: ``sft`` and ``grpo``.

``run`` puts them in order, ``session`` is what they share, ``engine`` is DeepSpeed.
"""
