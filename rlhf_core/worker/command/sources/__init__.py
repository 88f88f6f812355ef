"""Sources of progress of a program that does not beat, one file each."""
