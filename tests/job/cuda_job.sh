#!/usr/bin/env bash
# Goal: the whole job with `device: cuda`: log-probs of rollout worker and learner agree bit for bit at the learner's own
# version, in fp32 and bf16, and a synchronous run with one seed is the same twice, wherever its optimiser is and whether or not
# worker and learner share weights.
# usage: cuda_job.sh SLIPSTREAM ARITHMETIC_ENV; exit code 77: there is no CUDA here
set -euo pipefail
slipstream=$1
environment=$2
root=$(cd "$(dirname "$0")/../.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$slipstream" init "$work/model" --config flash-nano --seed 1 > "$work/init.log"
if ! "$slipstream" logprobs --model "$work/model" --ids 1,2 --device cuda > "$work/probe.log" 2>&1; then
  cat "$work/probe.log"
  exit 77
fi

# job NAME SETTING...: a short job; prints the figures of every step that must not depend on time.
job() {
  local name=$1 set settings=()
  shift
  for set in "$@"; do settings+=(--set "$set"); done
  "$slipstream" run -c "$root/configs/quickstart.yaml" --set device=cuda --set "run.dir=$work" --set "run.id=$name" \
    --set "model.path=$work/model" --set "environments=[{name: arithmetic, command: [$environment, --address, \"{address}\"], tasks: [{name: add_small}]}]" \
    --set learner.warmup.steps=6 --set learner.warmup.until_probability=1 --set learner.steps=6 "${settings[@]}" > "$work/$name.log" 2>&1 ||
    { tail -5 "$work/$name.log"; exit 1; }
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

for dtype in fp32 bf16; do
  job "async-$dtype" "model.dtype=$dtype" > "$work/async-$dtype.txt"
  # In bf16 the worker reads the learner's weights in place, but for the second run.
  job "sync-$dtype-1" "model.dtype=$dtype" rl.max_staleness=0 > "$work/sync-$dtype-1.txt"
  job "sync-$dtype-2" "model.dtype=$dtype" rl.max_staleness=0 rollout.share_weights=false > "$work/sync-$dtype-2.txt"
  job "sync-$dtype-3" "model.dtype=$dtype" rl.max_staleness=0 learner.optimizer.offload=true > "$work/sync-$dtype-3.txt"
  for file in model.safetensors optimizer/model.safetensors; do
    cmp "$work/sync-$dtype-1/checkpoints/latest/$file" "$work/sync-$dtype-3/checkpoints/latest/$file" ||
      { echo "FAIL: the optimiser's place changes $file in $dtype"; exit 1; }
  done
  diff "$work/sync-$dtype-1.txt" "$work/sync-$dtype-2.txt" || { echo "FAIL: two runs of one seed differ in $dtype"; exit 1; }
  echo "ok   $dtype: the mismatch is 0 in every step, two runs of one seed are the same, with shared weights or copies and with an offloaded optimiser"
done
