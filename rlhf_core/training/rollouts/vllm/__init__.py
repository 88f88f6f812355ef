"""vLLM as an engine: inside the trainer, as the sampler of an engine's process, and what runs in vLLM's own workers."""
