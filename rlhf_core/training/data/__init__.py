"""Data: files, rows, tokens and the batches of a step, with tokenizers and chat templates."""
