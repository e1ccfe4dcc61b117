#!/usr/bin/env bash
# The rules of layout that a machine can check: include direction between folders, no globs in CMake, #pragma once, file
# length, no TODO without a reason. Run from the repository's root; prints every violation and exits 1 if there is any.
set -u
cd "$(dirname "$0")/../.."
failures=0
complain() { printf '%s\n' "$*"; failures=$((failures + 1)); }

# What each folder may include, itself apart. rollout, learner and gateway never include each other.
declare -A allowed=(
  [common]=""
  [kernels]="common"
  [parallel]="common kernels"
  [model]="common kernels parallel"
  [proto]="common"
  [rollout]="common kernels parallel model proto"
  [learner]="common kernels parallel model proto"
  [gateway]="common model proto"
  [cli]="common kernels parallel model rollout learner gateway proto"
  [examples]="common kernels parallel model rollout learner gateway proto"
  [bench]="common kernels parallel model rollout learner gateway proto"
  [tests]="common kernels parallel model rollout learner gateway proto cli examples"
)

sources() { find "$1" -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cc.in' 2>/dev/null; }

for folder in "${!allowed[@]}"; do
  [ -d "$folder" ] || continue
  while IFS=: read -r file line include; do
    target=${include%%/*}
    [ -n "${allowed[$target]+known}" ] || continue  # a library's header, not one of our folders
    [ "$target" = "$folder" ] && continue
    case " ${allowed[$folder]} " in
      *" $target "*) ;;
      *) complain "$file:$line: $folder may not include $target ($include)" ;;
    esac
  done < <(sources "$folder" | xargs -r grep -nHoP '^\s*#\s*include\s+"\K[^"]+' 2>/dev/null)

  while read -r header; do
    case "$header" in *-inl.h) continue ;; esac  # compiled once per SIMD target: toggled guards instead
    grep -q '^#pragma once' "$header" || complain "$header: no #pragma once"
  done < <(find "$folder" -name '*.h')

  while read -r file; do
    lines=$(wc -l < "$file")
    case "$file" in *_test.cc) limit=1500 ;; *) limit=700 ;; esac
    [ "$lines" -le "$limit" ] || complain "$file: $lines lines, expected at most $limit"
  done < <(sources "$folder")
done

while IFS= read -r hit; do complain "$hit: a TODO gives its reason as TODO(reason)"; done < <(
  grep -rnE 'TODO([^(]|$)' --include='*.h' --include='*.cc' --include='*.cu' --include='*.proto' --include='*.py' "${!allowed[@]}" 2>/dev/null)
while IFS= read -r hit; do complain "$hit: sources are listed, not globbed"; done < <(
  grep -rnE 'file\(GLOB' --include=CMakeLists.txt . 2>/dev/null | grep -v '^./build/')

if [ "$failures" -gt 0 ]; then
  echo "tidy: $failures violations"
  exit 1
fi
echo "tidy: ok"
