#!/bin/sh
# A run over four nodes of a real, throw-away Slurm cluster on this machine: what `make slurm-demo` runs.
# usage: demo.sh BIN    (the folder of the rlhf command)
set -eu
bin=$1
cluster=$(dirname "$0")/cluster.py
folder=$(mktemp -d "${TMPDIR:-/tmp}/slurm.XXXXXX")
trap '"$bin/python" "$cluster" down "$folder" && rm -rf "$folder"' EXIT
trap 'exit 130' INT TERM
settings=$("$bin/python" "$cluster" up "$folder" --nodes 4)
eval "$settings"
sinfo
echo
RLHF_SCHEDULER=slurm "$bin/rlhf" run infra/presets/slurm-quickstart.toml
"$bin/rlhf" report last
echo
echo "look further:  $bin/rlhf show last   |   $bin/rlhf logs last --role agent   |   $bin/rlhf run slurm-quickstart --dry-run"
