"""The processes that run on a node: the agent, which starts, supervises and stops workers, and the worker itself.

Both are started with ``python -m rlhf_core.worker ...``, outside the control plane's process and often on another
machine.
"""
