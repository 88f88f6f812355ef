"""Launch lines and shell scripts, parsed without a shell: words and operators, commands and variables of a script, and
the launcher, program and options of a line. Pure."""
