#!/bin/bash
# Submits a fault-tolerant training job: a lighthouse, an array of replica groups, and a last job that ends the
# lighthouse when all groups have ended.
#
#   examples/cluster/slurm/submit.sh 4 examples/ddp/train.py --steps 1000
#   SBATCH_PARTITION=gpu MIN_REPLICAS=2 examples/cluster/slurm/submit.sh 8 --gres=gpu:4 -- \
#       --nproc-per-replica 4 train.py --lr 0.1
#
# Before a `--`: options of sbatch for the replica groups. After it: what ftrun gets, its own options first.
# LIGHTHOUSE_HOSTS=HOST0,HOST1: two lighthouses on two nodes, of which one stands by and takes over when the other's node
# fails (docs/high-availability.md); each job is bound to its node, by whose name all others reach it.
# JOB_DIR: a folder that all nodes see (default: a new one under ~/ft-jobs). It holds the token, the lighthouse's
# address and all output. Run this with the training environment active: sbatch hands PATH on to the jobs.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
[[ $# -ge 2 && $1 =~ ^[1-9][0-9]*$ ]] || { echo "usage: $0 REPLICAS [SBATCH-OPTION... --] script.py [ARGUMENT...]" >&2; exit 2; }
replicas=$1
shift
IFS=, read -ra hosts <<< "${LIGHTHOUSE_HOSTS:-}"
if [[ -n ${LIGHTHOUSE_HOSTS:-} && (${#hosts[@]} -ne 2 || ${hosts[0]} == "${hosts[1]}") ]]; then
    echo "LIGHTHOUSE_HOSTS=$LIGHTHOUSE_HOSTS: name two different nodes, with a comma between them" >&2
    exit 2
fi
options=()
if [[ " $* " == *" -- "* ]]; then
    while [ "$1" != -- ]; do options+=("$1"); shift; done
    shift
fi

umask 077
if [ -z "${JOB_DIR:-}" ]; then
    mkdir -p "$HOME/ft-jobs"
    JOB_DIR=$(mktemp -d "$HOME/ft-jobs/$(date +%Y%m%d-%H%M%S)-XXXX")
fi
mkdir -p "$JOB_DIR"
rm -f "$JOB_DIR/address"
head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n' > "$JOB_DIR/token"

if [ -z "${LIGHTHOUSE_HOSTS:-}" ]; then
    lighthouse=$(sbatch --parsable --output "$JOB_DIR/lighthouse.log" "$here/lighthouse.sbatch" "$JOB_DIR")
    after="after:$lighthouse"
else
    # Each has to be told of the other before either has a node: so nodes and port are chosen here, and announced.
    port=${LIGHTHOUSE_PORT:-$((20000 + RANDOM % 10000))}
    start() { # node, its partner's node, number
        LIGHTHOUSE_HOST=$1 LIGHTHOUSE_PORT=$port LIGHTHOUSE_PEER=$2:$port sbatch --parsable --nodelist "$1" \
            --output "$JOB_DIR/lighthouse-$3.log" "$here/lighthouse.sbatch" "$JOB_DIR"
    }
    one=$(start "${hosts[0]}" "${hosts[1]}" 0)
    other=$(start "${hosts[1]}" "${hosts[0]}" 1)
    lighthouse="$one $other" after="after:$one?after:$other" # one of them is enough to begin with
    printf '%s:%s,%s:%s\n' "${hosts[0]}" "$port" "${hosts[1]}" "$port" > "$JOB_DIR/address"
fi
array=$(sbatch --parsable --output "$JOB_DIR/replica-%a.log" --array "0-$((replicas - 1))" \
    --dependency "$after" "${options[@]}" "$here/replicas.sbatch" "$JOB_DIR" "$@")
sbatch --parsable --output /dev/null --job-name ft-end --ntasks 1 --dependency "afterany:$array" \
    --wrap "scancel $lighthouse" > /dev/null

echo "lighthouse: job ${lighthouse/ / and }; replicas: array $array, tasks 0-$((replicas - 1)); output: $JOB_DIR"
