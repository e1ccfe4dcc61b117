#!/usr/bin/env bash
# Sets up, builds everything and runs all tests. Ends in ctest's summary.
set -euo pipefail
cd "$(dirname "$0")/.."

deploy/debian_setup.sh
cmake --preset release
cmake --build --preset release
ctest --preset release
