#!/usr/bin/env bash
# Sets up, builds, creates a tiny GLM-5.3-Flash-shaped model, teaches it to count and lets it count on.
set -euo pipefail
cd "$(dirname "$0")/.."

deploy/debian_setup.sh
cmake --preset release
cmake --build --preset release --target slipstream toy_training

bin=build/release
mkdir -p runs
"$bin/cli/slipstream" init runs/tiny --config flash-tiny --force
"$bin/examples/toy_training" runs/tiny runs/counter

echo
echo "The model continues 3,7,11,15 (a step of 4):"
"$bin/cli/slipstream" generate --model runs/counter --ids 3,7,11,15 --max-tokens 8 --temperature 0
echo
echo "Next: $bin/cli/slipstream inspect runs/counter        what it is and costs"
echo "      $bin/cli/slipstream inspect flash               the published shape"
echo "      $bin/cli/slipstream logprobs --model runs/counter --ids 3,7,11,15 --json"
