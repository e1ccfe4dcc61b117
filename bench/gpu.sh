#!/usr/bin/env bash
# The CUDA forms on a machine that has the device but no compiler of ours: build a bundle here, carry it there, run it there.
#   bench/gpu.sh bundle DIR     builds with the preset cuda; DIR receives the binaries and the shared libraries they need,
#                               DIR.tar.xz all of it
#   DIR/gpu.sh run              there, at the root of a checkout: every GPU test, golden_check in fp32 and bf16, short jobs;
#                               one table, logs in DIR/logs or $LOGS
#   DIR/gpu.sh jobs             there: the quickstart, with worker and learner sharing a GPU and, where there are two, on one each; and
#                               the same with 150 M parameters; reward and tokens/s
#   DIR/gpu.sh operators        there: kernels' benchmarks, then public kernels at the same shapes (torch, and fla if installed)
#   DIR/gpu.sh slices           there: four layers of GLM-5.3-Flash and GLM-5.2, random weights: a row's bits in training,
#                               prefill and decode, then their speed and the kernels the time goes to; GLM-5.2 again with fp8
#                               weights; then transformers on the first
#   DIR/gpu.sh sanitize         there: compute-sanitizer's memcheck and, of a build with the preset racecheck, racecheck over the
#                               kernels' tests of small shapes
# Exits 1 when anything failed.
set -euo pipefail

binaries="kernels/kernels_cuda_test tests/invariance_test tests/fp8_load_test tests/optimizer_cuda_test tests/golden_check cli/slipstream examples/arithmetic_env bench/slice_bench kernels/kernels_cuda_bench"

bundle() {
  local root dir=$1 build=${BUILD:-build/cuda}
  root=$(cd "$(dirname "$0")/.." && pwd)
  cd "$root"
  if [ ! -e "$build/build.ninja" ]; then cmake --preset cuda; fi
  # shellcheck disable=SC2086
  cmake --build "$build" --target $(for b in $binaries; do basename "$b"; done)
  mkdir -p "$dir/lib"
  for b in $binaries; do
    cp "$build/$b" "$dir/"
    strip "$dir/$(basename "$b")"
    # What every machine with a driver has stays behind.
    ldd "$build/$b" | awk '$3 ~ /^\// {print $3}' |
      { grep -Ev '/(libc|libm|libdl|librt|libpthread|libcuda|libstdc\+\+|libgcc_s)\.so' || true; } |
      xargs -r -I{} cp -Lu {} "$dir/lib/"
  done
  if [ -e build/racecheck/build.ninja ]; then  # made by: cmake --preset racecheck
    cmake --build build/racecheck --target kernels_cuda_test
    strip -o "$dir/kernels_racecheck_test" build/racecheck/kernels/kernels_cuda_test
  fi
  cp "$0" "$dir/"
  # To carry it. The binaries hold the same kernels: a long window finds them.
  tar -C "$dir" -c . | xz -T1 -3 --lzma2=preset=3,dict=192MiB > "$dir.tar.xz"
  du -sh "$dir" "$dir.tar.xz"
}

failed=0
# step NAME COMMAND...: runs it, keeps its output in a log and prints one row.
step() {
  local name=$1 begin=$SECONDS result=ok
  shift
  "$@" > "$logs/$name.log" 2>&1 || result=FAIL
  # The last line that counts something: gtest's totals, or how many quantities passed.
  local summary
  summary=$(grep -cE '^ok ' "$logs/$name.log" || true)
  if [ "$summary" = 0 ]; then
    summary=$(grep -E '\[  (PASSED|FAILED|SKIPPED) +\] [0-9]+ test|(ERROR|RACECHECK) SUMMARY' "$logs/$name.log" | tr -d '\n' | tr -s ' ' || true)
  else
    summary="$summary quantities within their limits, $(grep -cE '^FAIL' "$logs/$name.log" || true) not"
  fi
  printf '%-32s %-5s %4d s  %s\n' "$name" "$result" $((SECONDS - begin)) "$summary"
  if [ "$result" = FAIL ]; then
    failed=1
    echo "  $logs/$name.log: $(tail -1 "$logs/$name.log")"
  fi
}

# Steps whose time is of no interest run side by side; finish waits for them.
running=()
beside() {
  ( step "$@"; exit $failed ) &
  running+=($!)
}
finish() {
  local pid
  for pid in "${running[@]}"; do wait "$pid" || failed=1; done
  running=()
}
# shards N NAME COMMAND...: a gtest binary's tests in N processes.
shards() {
  local count=$1 name=$2 i
  shift 2
  for ((i = 0; i < count; ++i)); do beside "${name}_$i" env "GTEST_TOTAL_SHARDS=$count" "GTEST_SHARD_INDEX=$i" "$@"; done
}

golden() {
  local fixture status=0
  for fixture in tests/golden/fixtures/*/; do "$here/golden_check" --device cuda "$@" "$fixture" || status=1; done
  return $status
}

run() {
  shards 4 kernels "$here/kernels_cuda_test" --gtest_brief=1
  beside golden_fp32 golden
  beside golden_bf16 golden --dtype bf16
  beside invariance "$here/invariance_test" --gtest_brief=1 '--gtest_filter=Cuda*'
  beside fp8_load "$here/fp8_load_test" --gtest_brief=1 '--gtest_filter=Cuda*'
  beside optimizer "$here/optimizer_cuda_test" --gtest_brief=1
  beside cuda_job tests/job/device_job.sh cuda "$here/slipstream" "$here/arithmetic_env"
  finish
}

# job NAME SETTING...: the quickstart's recipe on the GPU with these settings.
job() {
  local name=$1 set settings=()
  shift
  for set in "$@"; do settings+=(--set "$set"); done
  "$here/slipstream" run -c configs/quickstart.yaml --set device=cuda --set model.dtype=bf16 --set "run.dir=$logs" --set "run.id=$name" \
    --set "environments=[{name: arithmetic, command: [$here/arithmetic_env, --address, \"{address}\"], tasks: [{name: add_small}]}]" \
    --set "model.path=$logs/models/$name" "${settings[@]}" || return 1
  python3 - "$logs/$name/metrics.jsonl" <<'P'
import json, sys
rows = [row for row in map(json.loads, open(sys.argv[1])) if row["phase"] == "rl"]
def mean(key, part):  # a step may begin before any of its episodes is over
    values = [row[key] for row in part if row[key] is not None]
    return sum(values) / max(len(values), 1)
seconds = rows[-1]["wall_seconds"] - rows[0]["wall_seconds"]
trained = sum(row["trained_tokens"] for row in rows[1:])
print(f"ok reward {mean('reward_mean', rows[:10]):.3f} -> {mean('reward_mean', rows[-10:]):.3f} in {len(rows)} steps, {seconds:.0f} s;"
      f" generated {(rows[-1]['generated_tokens'] - rows[0]['generated_tokens']) / seconds:.0f}, trained {trained / seconds:.0f} tokens/s;"
      f" busy training {sum(row['train_seconds'] for row in rows[1:]) / seconds:.0%};"
      f" largest mismatch {max(row['mismatch_abs_max'] or 0 for row in rows)}")
P
}

jobs() {
  step job_quickstart job quickstart
  if [ "$(nvidia-smi -L 2> /dev/null | wc -l)" -gt 1 ]; then step job_two_gpus job two-gpus rollout.device=cuda:0 learner.device=cuda:1; fi
  step job_fp8_latents job fp8-latents rollout.fp8_latents=true learner.steps=100
  step job_150m job flash-150m 'model.init={config: flash-150m, seed: 1}' learner.steps=300 learner.warmup.learning_rate=3e-4 \
    learner.optimizer.learning_rate=1e-5
  grep -h '^ok reward' "$logs"/job_*.log
}

operators() {
  step operators "$here/kernels_cuda_bench"
  cat "$logs/operators.log"
  step operators_of_others python3 bench/kernel_peers.py
  cat "$logs/operators_of_others.log"
}

slices() {
  for preset in flash glm52; do
    step "slice_$preset" "$here/slice_bench" "configs/models/$preset.json" --check 3000 --trace
    cat "$logs/slice_$preset.log"
  done
  step slice_glm52_fp8 "$here/slice_bench" configs/models/glm52.json --fp8 --check 3000 --trace
  cat "$logs/slice_glm52_fp8.log"
  step slice_transformers python3 bench/slice_vs_transformers.py configs/models/flash.json --slice-bench "$here/slice_bench"
  cat "$logs/slice_transformers.log"
}

sanitize() {
  # Large shapes and the loops over every M take the tools hours.
  local filter=${FILTER:-'-*154880*:*GemmRows*:*CudaStream*:*6144*:*Large*:*Long*'}
  shards 7 memcheck compute-sanitizer --tool memcheck --error-exitcode 1 "$here/kernels_cuda_test" "--gtest_filter=$filter"
  if [ -e "$here/kernels_racecheck_test" ]; then
    shards 7 racecheck compute-sanitizer --tool racecheck --error-exitcode 1 "$here/kernels_racecheck_test" "--gtest_filter=$filter"
  fi
  finish
}

here=$(cd "$(dirname "$0")" && pwd)
case ${1:-} in
  bundle) bundle "${2:?bench/gpu.sh bundle: expected DIR}" ;;
  run | jobs | operators | slices | sanitize)
    if [ ! -e "$here/slipstream" ]; then
      echo "gpu.sh $1: no binaries beside $0; expected a bundle: bench/gpu.sh bundle DIR, then DIR/gpu.sh $1" >&2
      exit 2
    fi
    logs=${LOGS:-$here/logs}
    mkdir -p "$logs"
    export LD_LIBRARY_PATH="$here/lib:${LD_LIBRARY_PATH:-}"
    "$1"
    exit $failed
    ;;
  *)
    sed -n '2,/^set /{/^set /d; s/^# \{0,1\}//; p}' "$0"
    exit 2
    ;;
esac
