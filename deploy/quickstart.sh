#!/usr/bin/env bash
# Sets up, builds, and runs the quickstart job: a small GLM-5.3-Flash-shaped model learns to add, asynchronously, from an
# environment it talks to over gRPC. deploy/quickstart.sh [SEED]
set -euo pipefail
cd "$(dirname "$0")/.."
seed=${1:-1}

deploy/debian_setup.sh
cmake --preset release
cmake --build --preset release --target slipstream arithmetic_env guess_env calculator_env

slipstream=build/release/cli/slipstream
run=quickstart-seed$seed-$(date +%Y%m%d-%H%M%S)
"$slipstream" run -c configs/quickstart.yaml --set "run.id=$run" --set "run.seed=$seed" --set "model.init.seed=$seed" \
  --set "model.path=runs/models/flash-nano-$seed"

cat <<END

What to try next:
  $slipstream run -c runs/$run/config.yaml --set learner.steps=500     the same run goes on
  xdg-open runs/$run/report.html                     the page about this run (any browser; it needs no network)
  $slipstream run -c configs/quickstart.yaml --set run.id=sync --set rl.max_staleness=0     the same, synchronously
  $slipstream run -c configs/tools.yaml              multi-turn: the model learns to call a calculator
  $slipstream inspect runs/$run/checkpoints/latest   what was trained
  README.md, "The roles apart"                       the same job as separate processes, with mpirun
END
