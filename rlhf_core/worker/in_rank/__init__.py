"""Code that runs inside the ranks of an external trainer: standard library only, Python 3.8 or newer.

This folder is put on the program's PYTHONPATH, so that Python loads ``sitecustomize.py`` at the start of every process.
"""
