"""SGLang as an engine: its server as a child process, and the sampler over it."""
