#!/usr/bin/env bash
# Goal: the whole job on a device: log-probs of rollout worker and learner agree bit for bit at the learner's own
# version, in fp32 and bf16, and a synchronous run with one seed is the same twice, wherever its optimiser is, whether or not
# worker and learner share weights, and though it was killed and had to train the steps in its journal again.
# usage: device_job.sh DEVICE SLIPSTREAM ARITHMETIC_ENV; exit code 77: there is no such device here
set -euo pipefail
device=$1
slipstream=$2
environment=$3
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$slipstream" init "$work/model" --config flash-nano --seed 1 > "$work/init.log"
if ! "$slipstream" logprobs --model "$work/model" --ids 1,2 --device "$device" > "$work/probe.log" 2>&1; then
  cat "$work/probe.log"
  exit 77
fi

# start NAME SETTING...: a short job.
start() {
  local name=$1 set settings=()
  shift
  for set in "$@"; do settings+=(--set "$set"); done
  exec "$slipstream" run -c "$root/configs/quickstart.yaml" --set "device=$device" --set "run.dir=$work" --set "run.id=$name" \
    --set "model.path=$work/model" --set "environments=[{name: arithmetic, command: [$environment, --address, \"{address}\"], tasks: [{name: add_small}]}]" \
    --set learner.warmup.steps=6 --set learner.warmup.until_probability=1 --set learner.steps=6 "${settings[@]}" >> "$work/$name.log" 2>&1
}
# The same, killed as soon as its third step of RL is told.
killed() {
  start "$@" &
  local pid=$! i
  for ((i = 0; i < 12000; ++i)); do
    if [ "$(grep -c '"phase":"rl"' "$work/$1/metrics.jsonl" 2> /dev/null)" -ge 3 ] 2> /dev/null; then break; fi
    sleep 0.005
  done
  kill -9 "$pid"
  wait "$pid" 2> /dev/null || true
}
# To its end; prints the figures of every step that must not depend on time.
job() {
  local name=$1
  (start "$@") || { tail -5 "$work/$name.log"; exit 1; }
  python3 - "$work/$name/metrics.jsonl" <<'P'
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
rl = [row for row in rows if row["phase"] == "rl"]
assert len(rl) == 6, len(rl)
measured = [row["mismatch_abs_max"] for row in rl if row["mismatch_abs_max"] is not None]
assert measured, "no step had tokens of the learner's own version"
assert all(value == 0 for value in measured), measured
assert all(row["grad_norm"] > 0 and not row["skipped"] for row in rl), rl
for row in rows:
    print(row["step"], row["reward_mean"], row["loss"], row["grad_norm"], row["trained_tokens"])
P
}

dtypes="fp32 bf16" same="3 4"
if [ "$device" = cpu ]; then dtypes=bf16 same=4; fi  # fp32 is what other tests of jobs use; the optimiser has one place
for dtype in $dtypes; do
  job "async-$dtype" "model.dtype=$dtype" > "$work/async-$dtype.txt"
  # In bf16 the worker reads the learner's weights in place, but for the second run.
  job "sync-$dtype-1" "model.dtype=$dtype" rl.max_staleness=0 > "$work/sync-$dtype-1.txt"
  job "sync-$dtype-2" "model.dtype=$dtype" rl.max_staleness=0 rollout.share_weights=false > "$work/sync-$dtype-2.txt"
  if [ "$device" != cpu ]; then
    job "sync-$dtype-3" "model.dtype=$dtype" rl.max_staleness=0 learner.optimizer.offload=true > "$work/sync-$dtype-3.txt"
  fi
  for ((life = 0; life < 5; ++life)); do  # a job of a few steps may end before it is killed
    rm -rf "$work/sync-$dtype-4"
    killed "sync-$dtype-4" "model.dtype=$dtype" rl.max_staleness=0 learner.checkpoint_every=1000
    job "sync-$dtype-4" "model.dtype=$dtype" rl.max_staleness=0 learner.checkpoint_every=1000 > "$work/sync-$dtype-4.txt"
    if grep -q 'repeated [1-9][0-9]* steps' "$work/sync-$dtype-4/logs/learner.log"; then break; fi
  done
  if [ "$life" = 5 ]; then echo "FAIL: nothing was repeated in $dtype"; exit 1; fi
  for file in model.safetensors optimizer/model.safetensors; do
    for other in $same; do
      cmp "$work/sync-$dtype-1/checkpoints/latest/$file" "$work/sync-$dtype-$other/checkpoints/latest/$file" ||
        { echo "FAIL: the optimiser's place (3) or a kill (4) changes $file in $dtype: $other"; exit 1; }
    done
  done
  for other in 2 4; do
    diff "$work/sync-$dtype-1.txt" "$work/sync-$dtype-$other.txt" || { echo "FAIL: runs 1 and $other of one seed differ in $dtype"; exit 1; }
  done
  echo "ok   $dtype: the mismatch is 0 in every step, runs of one seed are the same with shared weights or copies, wherever the optimiser is, and killed"
done
