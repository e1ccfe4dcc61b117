#!/usr/bin/env python3
"""What we save, transformers loads, and computes the same with.

usage: transformers_roundtrip.py SLIPSTREAM FIXTURE_DIR_OR_PRESET...

For each fixture, or random checkpoint that `slipstream init` makes of a preset: `slipstream convert` to fp32 in several shards, load original and copy with transformers, compare logits
(equal to the bit: the weights are) and greedy ids; then compare `slipstream logprobs` with transformers' log-softmax.
Exits 77, which ctest counts as skipped, when torch or transformers is not installed.
"""

import json
import os
import subprocess
import sys
import tempfile


def main():
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    except ImportError as error:
        print(f"skipped: {error}")
        sys.exit(77)
    slipstream, fixtures = sys.argv[1], sys.argv[2:]

    def load(path):
        flash = AutoConfig.from_pretrained(path).model_type == "glm5_next"
        kind = AutoModelForImageTextToText if flash else AutoModelForCausalLM
        return kind.from_pretrained(path, dtype=torch.float32).eval()

    failures = 0
    for fixture in fixtures:
        with tempfile.TemporaryDirectory() as copy, tempfile.TemporaryDirectory() as made:
            if not os.path.isdir(fixture):
                subprocess.run([slipstream, "init", os.path.join(made, fixture), "--config", fixture, "--seed", "1"], check=True)
                fixture = os.path.join(made, fixture)
            subprocess.run([slipstream, "convert", fixture, copy, "--dtype", "fp32", "--shard-bytes", "300000"], check=True)
            assert os.path.exists(os.path.join(copy, "model.safetensors.index.json")), "expected several shards"
            ids = torch.arange(3, 93)[None] * 7 % 250 + 3
            with torch.no_grad():
                before, after = load(fixture)(input_ids=ids).logits, load(copy)(input_ids=ids).logits
            text = ",".join(str(i) for i in ids[0].tolist())
            out = subprocess.run([slipstream, "logprobs", "--model", copy, "--ids", text, "--json"], check=True,
                                 capture_output=True, text=True).stdout
            ours = torch.tensor(json.loads(out)["logprobs"][1:])
            theirs = torch.log_softmax(before[0, :-1].float(), -1).gather(-1, ids[0, 1:, None])[:, 0]
            same, error = torch.equal(before, after), (ours - theirs).abs().max().item()
            ok = same and error <= 2e-4
            failures += not ok
            print(f"{'ok  ' if ok else 'FAIL'} {os.path.basename(fixture)}: reloaded logits equal: {same}, logprobs {error:.2e}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
