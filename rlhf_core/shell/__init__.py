"""Launch lines and shell scripts, read without a shell: words and operators, commands and variables of a script, and
the launcher, program and options of one line. Pure."""
