"""Rollout engines from the side of the trainer: prompts dispatched over HTTP, completions awaited, weights sent."""
