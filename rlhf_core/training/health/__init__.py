"""Health of training while it runs: signals of each step, rules over them, and the verdict. Pure."""
