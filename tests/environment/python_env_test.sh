#!/usr/bin/env bash
# Goal: the Python example passes the conformance test. Skipped (77), and said so, where it cannot run.
# usage: python_env_test.sh SLIPSTREAM PYTHON
set -u
here=$(cd "$(dirname "$0")" && pwd)
slipstream=$1 python=$2
"$python" -c 'import grpc, reasoning_gym' 2>/dev/null || { echo "skipped: $python has no grpc or no reasoning_gym"; exit 77; }
command -v protoc grpc_python_plugin >/dev/null || { echo "skipped: no protoc or grpc_python_plugin"; exit 77; }
exec "$here/check_env_test.sh" "$slipstream" good "$python" "$here/../../examples/python/reasoning_gym_env.py" \
  --datasets chain_sum,leg_counting,spell_backward
