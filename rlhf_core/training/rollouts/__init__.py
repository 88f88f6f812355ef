"""Ways to sample completions: one protocol (``base``) and one implementation per engine.

``remote`` calls engines in separate processes, ``server`` runs them; ``vllm`` and ``sglang`` contain the code specific
to these two.
"""
