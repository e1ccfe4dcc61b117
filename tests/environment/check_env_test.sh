#!/usr/bin/env bash
# Goal: check-env passes an environment that keeps the rules, and fails one that breaks any of them.
# usage: check_env_test.sh SLIPSTREAM good COMMAND...     the server must pass
#        check_env_test.sh SLIPSTREAM broken BROKEN_ENV   every defect it has must be noticed
#        check_env_test.sh SLIPSTREAM hostile HOSTILE_ENV it misbehaves as asked, and still ends when told to
set -u
slipstream=$1 mode=$2
shift 2
work=$(mktemp -d)
server=
stop() { [ -n "$server" ] && kill "$server" 2>/dev/null && wait "$server" 2>/dev/null; server=; }
trap 'stop; rm -rf "$work"' EXIT
failures=0
fail() { echo "FAIL: $*"; failures=$((failures + 1)); }

# start COMMAND...: sets $server and $address once it listens.
start() {
  mkfifo "$work/out"
  "$@" --address 127.0.0.1:0 >"$work/out" &
  server=$!
  address=
  exec 3<"$work/out"
  rm "$work/out"
  while read -r line <&3; do
    case "$line" in "listening on "*) address=${line#listening on }; break ;; esac
  done
  [ -n "$address" ] || { fail "$* never listened"; exit 1; }
}

case "$mode" in
  good)
    start "$@"
    "$slipstream" check-env "$address" || fail "check-env failed"
    "$slipstream" check-env "$address" --task "no such task" >/dev/null 2>&1 && fail "a task that is not there passes"
    kill -TERM "$server"
    wait "$server" || fail "exit code $? after SIGTERM"
    server=
    ;;
  broken)
    defects=$("$1" --list)
    [ -n "$defects" ] || fail "no defects"
    while IFS='|' read -r defect check; do
      start "$1" ${defect:+--defect "$defect"}
      "$slipstream" check-env "$address" --task guess --timeout-ms 1000 --json >"$work/json" 2>"$work/stderr"
      code=$?
      if [ -z "$defect" ]; then
        [ "$code" -eq 0 ] || fail "without a defect: $(cat "$work/json")"
      else
        [ "$code" -eq 1 ] || fail "$defect: exit code $code, expected 1"
        [ "$(wc -l <"$work/stderr")" -eq 1 ] || fail "$defect: expected one line: $(cat "$work/stderr")"
        grep -qE "\"check\":\"[^\"]*$check[^\"]*\",\"ok\":false" "$work/json" || fail "$defect: $check passes: $(cat "$work/json")"
      fi
      stop
    done < <(echo; echo "$defects")
    "$slipstream" check-env 127.0.0.1:1 >"$work/stdout" 2>"$work/stderr" && fail "passes where nobody listens"
    grep -q 'Describe: UNAVAILABLE' "$work/stdout" || fail "nobody listens: $(cat "$work/stdout")"
    ;;
  hostile)
    while read -r flag seen; do
      start "$1" "--$flag-probability" 1
      "$slipstream" check-env "$address" --task add --timeout-ms 200 >"$work/stdout" 2>/dev/null && fail "$flag: passes"
      grep -q "$seen" "$work/stdout" || fail "$flag: no \"$seen\" in $(cat "$work/stdout")"
      if [ "$flag" = exit ]; then
        wait "$server"; code=$?
        [ "$code" -eq 1 ] || fail "exit: exit code $code, expected 1"
      else
        kill -TERM "$server"
        wait "$server" || fail "$flag: exit code $? after SIGTERM"
      fi
      server=
    done <<'END'
abort INTERNAL
stall DEADLINE_EXCEEDED
garbage expected
exit UNAVAILABLE
END
    ;;
esac
[ "$failures" -eq 0 ] && echo "check_env $mode: ok"
exit $((failures > 0))
