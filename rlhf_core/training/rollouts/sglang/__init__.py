"""SGLang as an engine: its server as a child process, and the sampler that uses it."""
