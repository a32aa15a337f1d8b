#!/bin/bash
# Tries the scripts on a real Slurm (one node with four free cores is enough), with the plain example:
#
#   examples/cluster/slurm/try.sh            about four minutes; 0 and equal digests if all is well
#
# Three groups train; then one ftrun is killed with kill -9, one task is drained with SIGTERM, one is cancelled and
# queued again, and the lighthouse is queued again. Each comes back and the job ends with equal models.
# All tasks must run on this machine (kill -9) and share its files.
set -euo pipefail
cd "$(dirname "$0")/../../.."
JOB_DIR=$(mktemp -d "${TMPDIR:-/tmp}/ft-try-XXXX")
export JOB_DIR
submitted=$(examples/cluster/slurm/submit.sh 3 --time=20 -- examples/ddp/train.py --steps "${STEPS:-5000}" --log-every 500)
echo "$submitted"
lighthouse=$(sed -n 's/.*lighthouse: job \([0-9]*\).*/\1/p' <<< "$submitted")
array=$(sed -n 's/.*array \([0-9]*\).*/\1/p' <<< "$submitted")

say() { echo "$(date +%T) $*"; }
now() { sleep 3; scontrol update JobId="$1" StartTime=now; } # not the two minutes that Slurm lets a requeued job wait
seen() { # file, text, how often: wait for it
    for _ in $(seq 600); do
        count=$(grep -cs -- "$2" "$JOB_DIR/$1") || true
        [ "${count:-0}" -ge "$3" ] && return
        sleep 0.2
    done
    say "never seen in $JOB_DIR/$1: $2"
    exit 1
}

for task in 0 1 2; do seen "replica-$task.log" "step  500" 1; done
say "kill -9 the ftrun of task 1"
kill -9 "$(pgrep -f -- "--replica 1 .*$(cat "$JOB_DIR/address")")"
seen replica-1.log "status 137; queued again" 1
now "${array}_1"
seen replica-1.log "healed to step [1-9]" 1

say "drain task 2 with SIGTERM"
scancel --batch --signal=TERM "${array}_2"
seen replica-2.log "after a drain; queued again" 1
now "${array}_2"
seen replica-2.log "healed to step [1-9]" 1

say "cancel task 1 and queue it again"
scancel "${array}_1"
seen replica-1.log "drained at step" 1
sleep 2
scontrol requeue "${array}_1"
now "${array}_1"
seen replica-1.log "healed to step [1-9]" 2

say "queue the lighthouse again"
scontrol requeue "$lighthouse"
now "$lighthouse"
seen lighthouse.log "listens on" 2

for task in 0 1 2; do seen "replica-$task.log" "digest" 1; done
say "all have ended"
grep -h digest "$JOB_DIR"/replica-*.log
digests=$(grep -ho "digest .*" "$JOB_DIR"/replica-*.log | sort -u | wc -l)
[ "$digests" = 1 ]
