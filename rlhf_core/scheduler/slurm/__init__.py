"""Slurm, through its commands; submitit only writes the batch script."""
