"""Ways to sample completions: one protocol (``base``) and one implementation per engine.

Engines in processes of their own are called from ``remote`` and run by ``server``; ``vllm`` and ``sglang`` are what is
particular to these two.
"""
