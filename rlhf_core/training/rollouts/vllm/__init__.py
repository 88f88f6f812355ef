"""vLLM as an engine: inside the trainer, as the sampler of an engine's process, and the extension of vLLM's workers."""
