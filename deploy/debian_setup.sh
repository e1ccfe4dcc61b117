#!/usr/bin/env bash
# Installs what a bare Debian 12 machine needs to build Slipstream and run its tests. Asks for root only if something is
# missing.
set -euo pipefail

packages=(g++ cmake ninja-build ccache libabsl-dev libhwy-dev nlohmann-json3-dev libcli11-dev libgtest-dev libbenchmark-dev
  libopenblas-pthread-dev libgrpc++-dev libgrpc-dev protobuf-compiler protobuf-compiler-grpc libprotobuf-dev
  libopenmpi-dev openmpi-bin libzmq3-dev cppzmq-dev prometheus-cpp-dev libyaml-cpp-dev libspdlog-dev)

missing=()
for package in "${packages[@]}"; do
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
done
[ ${#missing[@]} -eq 0 ] && exit 0

as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "debian_setup: needs root (or sudo) to install: ${missing[*]}" >&2; exit 1; }
  as_root=(sudo)
fi
"${as_root[@]}" apt-get update -q
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
