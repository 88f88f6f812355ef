"""Programs of a node: the agent that starts, watches and ends the workers, and the worker process itself.

Started by name, ``python -m rlhf_core.worker ...``, in another process than the control plane and often on another
machine.
"""
