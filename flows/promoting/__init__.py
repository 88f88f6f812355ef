"""What becomes of the model of a completed run: the question, the answers, and the promotion."""
