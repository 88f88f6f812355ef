"""The trainer's side of rollout engines: dispatching prompts over HTTP, awaiting completions, sending weights."""
