#!/usr/bin/env bash
# One node of a Ray cluster that lives as long as one program: the first node starts Ray's head and, once all nodes are
# there, the program; the others join and end with it, and with its exit code.
#
#   ray_node.sh NODE_RANK NUM_NODES HEAD_ADDRESS HEAD_PORT GPUS_PER_NODE FOLDER COMMAND [ARGUMENT ...]
#
# FOLDER is visible to all nodes and belongs to this start alone; the program's exit code is stored in it.
# RLHF_RAY_TIMEOUT_S is the longest wait for the nodes, in seconds; 900 unless it is set.
set -u
node_rank=$1 num_nodes=$2 address=$3 port=$4 gpus=$5 folder=$6
shift 6
mkdir -p "$folder"
result=$folder/exit_code
timeout_s=${RLHF_RAY_TIMEOUT_S:-900}
# A proxy would answer requests to the head itself.
no_proxy=$address,${no_proxy:-${NO_PROXY:-}}
export no_proxy NO_PROXY=$no_proxy

# Ray runs in the foreground of our own process, because `ray stop` would end the Ray of every job on the node.
node=""
end_node() { [ -n "$node" ] && kill "$node" 2>/dev/null && wait "$node"; }
trap end_node EXIT
trap 'exit 143' TERM
trap 'exit 130' INT

errors=$folder/errors-$node_rank
give_up_late() {
  [ "$SECONDS" -lt "$timeout_s" ] && return
  echo "$1 after $timeout_s s (RLHF_RAY_TIMEOUT_S): $(tail -n 5 "$errors")" >&2
  exit 1
}

if [ "$node_rank" -eq 0 ]; then
  rm -f "$result"
  ray start --head --block --disable-usage-stats --node-ip-address="$address" --port="$port" --num-gpus="$gpus" &
  node=$!
  export RAY_ADDRESS=$address:$port
  # Ray prints all nodes in one line, and at most 100 of them unless told otherwise.
  alive() { ray list nodes --filter state=ALIVE --limit 10000 --format json 2>"$errors" | grep -o '"node_id"' | wc -l; }
  until joined=$(alive) && [ "$joined" -ge "$num_nodes" ]; do
    kill -0 "$node" 2>/dev/null || { echo "ray's head has ended before $num_nodes nodes were there" >&2; exit 1; }
    give_up_late "$joined of $num_nodes nodes have joined ray"
    sleep 2
  done
  "$@" &
  program=$!
  trap 'kill -TERM $program 2>/dev/null; wait $program; exit 143' TERM
  wait "$program"
  code=$?
  echo "$code" >"$result.part" && mv "$result.part" "$result"
  exit "$code"
fi

until ray health-check --address "$address:$port" >"$errors" 2>&1; do
  give_up_late "ray's head is not reached at $address:$port"
  sleep 2
done
ray start --block --disable-usage-stats --address="$address:$port" --num-gpus="$gpus" &
node=$!
while [ ! -s "$result" ]; do
  kill -0 "$node" 2>/dev/null || { sleep 5; [ -s "$result" ] && break; echo "ray's node has ended before the program" >&2; exit 1; }
  sleep 2
done
exit "$(cat "$result")"
