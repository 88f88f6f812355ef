"""The part that runs inside the ranks of another program: standard library alone, any Python from 3.8 on.

The folder is put on PYTHONPATH of the program. Python then loads ``sitecustomize.py`` at the start of every process.
"""
