#!/bin/sh
# The main job, end to end, on this machine: what `make demo` runs once the environment exists.
# usage: demo.sh BIN    (the folder of the rlhf command)
set -eu
bin=$1
"$bin/rlhf" run infra/presets/quickstart.toml
"$bin/rlhf" report last
echo
echo "look further:  $bin/rlhf show last   |   $bin/rlhf runs   |   $bin/rlhf sql 'SELECT * FROM run_goodput'"
