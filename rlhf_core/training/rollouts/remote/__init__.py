"""The trainer's side of rollout engines: dispatching prompts over HTTP, collecting completions, sending weights."""
