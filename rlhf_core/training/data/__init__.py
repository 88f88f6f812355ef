"""Data: from files to rows to tokens to the batches of a step. Tokenizers and chat templates included."""
