#!/usr/bin/env bash
# What asynchrony is worth against an environment with long-tailed latency (log-normal, median 50 ms, 99th percentile 2 s):
# the same job with max_staleness 0 and 2, each until the mean reward of ten steps reaches a level. Prints both wall times,
# their ratio, and who waited. bench/async_pays.sh [BUILD_DIR] [REWARD]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/release}
level=${2:-0.6}
out=runs/async_pays
rm -rf "$out"
mkdir -p "$out"

# Both halves begin with the model that one warm-up made.
job() {  # ID FLAGS...
  local id=$1
  shift
  "$build/cli/slipstream" run -c configs/quickstart.yaml --set run.dir="$out" --set run.id="$id" "$@" >"$out/$id.out" 2>&1
}
job warm-up --set learner.steps=1
model=$(ls -d "$out"/warm-up/checkpoints/step_* | tail -1)
for staleness in 0 2; do
  job "staleness-$staleness" --set model.path="$model" --set learner.warmup.steps=0 \
    --set rl.max_staleness=$staleness --set rl.groups_per_batch=32 --set learner.steps=130 \
    --set gateway.episode_threads=512 --set learner.optimizer.schedule=constant \
    --set "environments=[{name: slow, command: [$build/examples/hostile_env, --address, '{address}', --latency-p50-ms, '50', --latency-p99-ms, '2000'], tasks: [{name: add_small}]}]"
done

python3 - "$out" "$level" <<'PYTHON'
import json, sys
out, level = sys.argv[1], float(sys.argv[2])
times = {}
for staleness in (0, 2):
    lines = [json.loads(line) for line in open(f"{out}/staleness-{staleness}/metrics.jsonl")]
    lines = [line for line in lines if line["phase"] == "rl"]
    start = lines[0]["wall_seconds"] - lines[0]["wait_data_seconds"] - lines[0]["train_seconds"]
    recent = []
    reached = None
    for line in lines:
        if line["reward_mean"] is not None:
            recent = (recent + [line["reward_mean"]])[-10:]
        if len(recent) == 10 and sum(recent) / 10 >= level:
            reached = line
            break
    if reached is None:
        sys.exit(f"max_staleness {staleness}: reward {sum(recent) / len(recent):.3f} after {len(lines)} steps, never {level}")
    seconds = reached["wall_seconds"] - start
    times[staleness] = seconds
    waited = sum(l["wait_data_seconds"] for l in lines if l["step"] <= reached["step"])
    rollout = reached["idle_seconds"].get("rollout", float("nan"))
    print(f"max_staleness {staleness}: reward {level} after {seconds:.1f} s, {reached['phase_step']} steps; "
          f"idle: learner {waited:.1f} s, rollout {rollout:.1f} s since the start")
print(f"asynchronous / synchronous: {times[2] / times[0]:.2f}")
PYTHON
