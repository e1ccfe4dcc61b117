#!/usr/bin/env bash
# Goal: the command line keeps its fixed forms, writes what it reads, and answers bad input with one line and a code.
# usage: cli_test.sh SLIPSTREAM FIXTURES_DIR TOY_TRAINING
set -u
slipstream=$1
fixtures=$2
toy_training=$3
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failures=0
fail() { echo "FAIL: $*"; failures=$((failures + 1)); }

# expect_output PATTERN COMMAND...: succeeds and prints a line that matches.
expect_output() {
  local pattern=$1; shift
  local out
  out=$("$@" 2>"$work/stderr") || { fail "$* failed: $(cat "$work/stderr")"; return; }
  grep -qE -e "$pattern" <<<"$out" || fail "$*: no match for $pattern in: $out"
}
# expect_error CODE PATTERN COMMAND...: fails with this code and one matching line on stderr.
expect_error() {
  local code=$1 pattern=$2; shift 2
  "$@" >"$work/stdout" 2>"$work/stderr"
  local got=$?
  [ "$got" -eq "$code" ] || fail "$*: exit code $got, expected $code: $(cat "$work/stderr")"
  grep -qE -e "$pattern" "$work/stderr" || fail "$*: no match for $pattern in: $(cat "$work/stderr")"
  [ "$code" -ne 1 ] || [ "$(wc -l <"$work/stderr")" -eq 1 ] || fail "$*: expected one line, got: $(cat "$work/stderr")"
}

expect_output '^\{"model_type":"glm_moe_dsa","parameters":\{"total":753864139008,"backbone":742008052992,"embedding":951582720,"lm_head":951582720,"mtp":9952920576,"vision":0,"active":[0-9]+' \
  "$slipstream" inspect glm5 --json
expect_output '"cache_bytes_per_token":\{"latent":89856,"indexer":19968\},"state_bytes":0' "$slipstream" inspect glm5 --json
expect_output '"weights":80[0-9]{9},"attention":22[0-9]{9},"indexer":172[0-9]{9}' "$slipstream" inspect glm52 --json --context 1000000
expect_output 'active per token' "$slipstream" inspect "$fixtures/glm53_flash"

for preset in glm5-tiny glm52-tiny flash-tiny; do
  expect_output 'parameters$' "$slipstream" init "$work/$preset" --config "$preset" --seed 3 --shard-bytes 400000
  expect_output '^\{"ids":\[5,9,17\],"logprobs":\[null,-[0-9.]+,-[0-9.]+\]\}$' "$slipstream" logprobs --model "$work/$preset" --ids 5,9,17 --json
  expect_output '^\{"ids":\[([0-9]+,){5}[0-9]+\],"logprobs":\[' "$slipstream" generate --model "$work/$preset" --ids 5,9,17 --max-tokens 6 --temperature 0 --ignore-eos --json
done

# Generated log-probs are those of logprobs, to the bit, in both dtypes and on one thread or two.
for dtype in fp32 bf16; do
  generated=$("$slipstream" generate --model "$work/flash-tiny" --ids 5,9,17 --max-tokens 20 --seed 7 --ignore-eos --dtype $dtype --threads 1 --json)
  [ "$generated" = "$("$slipstream" generate --model "$work/flash-tiny" --ids 5,9,17 --max-tokens 20 --seed 7 --ignore-eos --dtype $dtype --no-weight-panels --json)" ] ||
    fail "weight panels change what is generated in $dtype"
  new=$(sed -E 's/.*"ids":\[([^]]*)\].*/\1/' <<<"$generated")
  logprobs=$(sed -E 's/.*"logprobs":\[([^]]*)\].*/\1/' <<<"$generated")
  expect_output "^.*\"logprobs\":\[null,[^,]*,[^,]*,$logprobs\]\}$" "$slipstream" logprobs --model "$work/flash-tiny" --ids "5,9,17,$new" --dtype $dtype --threads 2 --json
done

expect_output 'written' "$slipstream" convert "$work/flash-tiny" "$work/converted" --dtype bf16
expect_output '^\{"ids"' "$slipstream" logprobs --model "$work/converted" --ids 5,9,17 --dtype bf16 --json

# At the end of the positions generation stops, and says so.
long=$(seq -s, 3 1 258); long="$long,$long,$long,$long"   # 1,024 tokens
expect_output '^\{"ids":\[[0-9]+\],.*"finish_reason":"length"\}$' "$slipstream" generate --model "$fixtures/glm47" --ids "$long" --max-tokens 9223372036854775800 --ignore-eos --json

expect_error 1 'temperature: expected 0 or' "$slipstream" generate --model "$work/flash-tiny" --ids 5 --temperature 1e-45
expect_error 1 '\-\-ids: 1025 tokens, .*max_position_embeddings 1024' "$slipstream" generate --model "$fixtures/glm47" --ids "$long,5"
expect_error 1 '\-\-ids: 1025 tokens, .*max_position_embeddings 1024' "$slipstream" logprobs --model "$fixtures/glm47" --ids "$long,5"
expect_error 2 'required' "$slipstream" logprobs --ids 5
expect_error 2 'not expected' "$slipstream" inspect glm5 --surprise
expect_error 1 'nope: no such file, nor one of the presets' "$slipstream" inspect nope
expect_error 2 'slipstream: isnpect: no such command, expected one of run ' "$slipstream" isnpect nope
expect_error 1 "--worker-id: " "$slipstream" rollout -c "$root/configs/quickstart.yaml" --worker-id ""
expect_error 1 "--set rl.max_staleness=: no value" "$slipstream" run -c "$root/configs/quickstart.yaml" --set rl.max_staleness=
expect_error 1 'nope/config.json|nope: cannot be opened' "$slipstream" logprobs --model "$work/nope" --ids 5
expect_error 1 '\-\-ids: "5,x", expected token ids' "$slipstream" logprobs --model "$work/flash-tiny" --ids 5,x
expect_error 1 '\-\-ids: 100000, expected ids in 0..287' "$slipstream" logprobs --model "$work/flash-tiny" --ids 5,100000
expect_error 1 '\-\-dtype: "fp16", expected fp32 or bf16' "$slipstream" logprobs --model "$work/flash-tiny" --ids 5 --dtype fp16
for threads in 0 257 "" 99999999999999999999 2.5; do
  expect_error 2 "\-\-threads: \"$threads\", expected an integer in 1..256" "$slipstream" logprobs --model "$work/flash-tiny" --ids 5 --threads "$threads"
done
expect_error 2 '\-\-max-tokens: "", expected an integer >= 1' "$slipstream" generate --model "$work/flash-tiny" --ids 5 --max-tokens ""
expect_error 2 '\-\-max-tokens: "9223372036854775808", expected' "$slipstream" generate --model "$work/flash-tiny" --ids 5 --max-tokens 9223372036854775808
expect_error 2 '\-\-top-k: "4294967296", expected' "$slipstream" generate --model "$work/flash-tiny" --ids 5 --top-k 4294967296
expect_error 2 '\-\-seed: "-1", expected' "$slipstream" generate --model "$work/flash-tiny" --ids 5 --seed -1
expect_error 2 '\-\-top-p: "", expected a number' "$slipstream" generate --model "$work/flash-tiny" --ids 5 --top-p ""
expect_error 2 '\-\-shard-bytes: "1e9", expected an integer' "$slipstream" init "$work/never" --config flash-tiny --shard-bytes 1e9
expect_error 1 'holds a model already' "$slipstream" init "$work/flash-tiny" --config flash-tiny
expect_error 1 'holds a model already' "$slipstream" convert "$work/flash-tiny" "$work/converted"
expect_output 'written' "$slipstream" convert "$work/flash-tiny" "$work/converted" --dtype fp32 --force
expect_output 'parameters$' "$slipstream" init "$work/glm5-tiny" --config flash-tiny --force
expect_output '^\{"ids"' "$slipstream" logprobs --model "$work/glm5-tiny" --ids 5,9,17 --json
mkdir "$work/twice" && sed '0,/"hidden_size"/s//"vocab_size": 4, "hidden_size"/' "$work/flash-tiny/config.json" >"$work/twice/config.json"
expect_error 1 'config.json: "vocab_size": stands twice in one object' "$slipstream" inspect "$work/twice"
expect_error 1 '753864139008 parameters, expected at most' "$slipstream" init "$work/huge" --config glm5
head -c 1000 "$work/converted/model.safetensors" >"$work/cut" && mv "$work/cut" "$work/converted/model.safetensors"
expect_error 1 'model.safetensors' "$slipstream" logprobs --model "$work/converted" --ids 5

# A job's file is refused before anything is made, by line and field; so is a run that is not there.
job() { printf 'model: {path: %s/job-model, init: {config: flash-tiny}}\nrun: {dir: %s/runs}\nenvironments: [{name: a, address: "127.0.0.1:1", tasks: [{name: add}]}]\n' "$work" "$work"; }
job >"$work/job.yaml"
{ job; echo 'rl: {max_stalenes: 1}'; } >"$work/key.yaml"
{ job; echo 'rl: {group_size: many}'; } >"$work/value.yaml"
job | grep -v environments >"$work/none.yaml"
for role in run gateway rollout learner; do
  expect_error 1 'nope.yaml' "$slipstream" $role -c "$work/nope.yaml"
  expect_error 1 'key.yaml:4: rl.max_stalenes' "$slipstream" $role -c "$work/key.yaml"
  expect_error 1 'value.yaml:4: rl.group_size: "many", expected an integer' "$slipstream" $role -c "$work/value.yaml"
  expect_error 1 'environments: missing, expected at least one' "$slipstream" $role -c "$work/none.yaml"
  expect_error 1 'max_staleness: unknown key, expected one of: chat, device, environments' "$slipstream" $role -c "$work/job.yaml" --set max_staleness=1
  expect_error 1 '\-\-set rl: expected section.key=value' "$slipstream" $role -c "$work/job.yaml" --set rl
  expect_error 2 'config' "$slipstream" $role
done
for role in run learner; do expect_error 1 'learner.device: cuda:99: ' "$slipstream" $role -c "$work/job.yaml" --set learner.device=cuda:99; done
for role in run rollout; do expect_error 1 'rollout.device: cuda:99: ' "$slipstream" $role -c "$work/job.yaml" --set rollout.device=cuda:99; done
[ ! -e "$work/runs" ] && [ ! -e "$work/job-model" ] || fail "a refused job left files: $(ls "$work/runs" "$work/job-model")"
expect_error 1 'runs/nope: no such directory, expected a run' "$slipstream" report "$work/runs/nope"

# The example that trains a model on one page: what it trained is loaded again, and predicts the sequence.
out=$("$toy_training" "$work/flash-tiny" "$work/counts" --steps 50 2>&1) || fail "toy_training: $out"
first=$(sed -nE 's/^step +1  loss ([0-9.]+) .*/\1/p' <<<"$out") last=$(sed -nE 's/^step +50  loss ([0-9.]+) .*/\1/p' <<<"$out")
awk "BEGIN { exit !($last < 0.8 * $first) }" || fail "toy_training does not learn: $out"
expect_output '^\{"ids"' "$slipstream" logprobs --model "$work/counts" --ids 5,9,13 --json

[ "$failures" -eq 0 ] && echo "cli: ok"
exit $((failures > 0))
