#!/usr/bin/env python3
"""Our model and Hugging Face transformers on the same checkpoint, machine and threads, one after the other.

usage: model_vs_transformers.py BUILD_DIR MODEL_DIR [--threads N] [--only train|decode]

Needs torch and transformers >= 5.17. Prints tokens a second, peak memory and the ratio of each. A checkpoint to measure
with: `slipstream init /tmp/flash-150m --config flash-150m`.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time

# The peer needs about 25 MiB a token here: longer batches than this do not fit 24 GiB.
TRAIN = [dict(batch=1, tokens=512)]
DECODE = [dict(batch=1, tokens=128, steps=32), dict(batch=16, tokens=128, steps=32)]


def load(path, threads):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    torch.set_num_threads(threads)
    kind = AutoModelForImageTextToText if AutoConfig.from_pretrained(path).model_type == "glm5_next" else AutoModelForCausalLM
    return torch, kind.from_pretrained(path, dtype=torch.float32)


def peer_train(path, threads, batch, tokens):
    torch, model = load(path, threads)
    model.train()
    ids = torch.randint(0, model.lm_head.weight.shape[0], (batch, tokens), generator=torch.Generator().manual_seed(1))
    best = float("inf")
    for attempt in range(3):
        start = time.time()
        model.zero_grad(set_to_none=True)
        logits = model(input_ids=ids, use_cache=False).logits
        logprobs = torch.log_softmax(logits[:, :-1].float(), -1).gather(-1, ids[:, 1:, None])
        (-logprobs.mean()).backward()
        if attempt > 0:
            best = min(best, time.time() - start)
    return batch * tokens / best


def peer_decode(path, threads, batch, tokens, steps):
    torch, model = load(path, threads)
    model.eval()
    ids = torch.randint(3, model.lm_head.weight.shape[0], (batch, tokens), generator=torch.Generator().manual_seed(1))

    def seconds(new):
        start = time.time()
        with torch.no_grad():
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False)
        return time.time() - start

    seconds(2)
    # The prompt's share is taken off: only decoding is compared.
    return batch * steps / min(seconds(steps + 1) - seconds(1) for _ in range(2))


def ours(build, path, threads, mode, options):
    command = [os.path.join(build, "bench", "model_bench"), mode, "--model", path, "--threads", str(threads)]
    for key, value in options.items():
        command += [f"--{key}", str(value)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def peer(path, threads, mode, options):
    """In a process of its own, so that its peak memory is its own."""
    command = [sys.executable, os.path.abspath(__file__), "--peer", mode, path, "--threads", str(threads), "--options", json.dumps(options)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("first")
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", choices=["train", "decode"])
    parser.add_argument("--peer", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--options", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peer:
        run = peer_train if args.first == "train" else peer_decode
        rate = run(args.model, args.threads, **json.loads(args.options))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"tokens_per_second": rate, "peak_mib": peak}))
        return
    print(f"{'what':34} {'ours tok/s':>12} {'peer tok/s':>12} {'speed-up':>9} {'ours MiB':>9} {'peer MiB':>9}")
    for mode, cases in (("train", TRAIN), ("decode", DECODE)):
        for options in cases:
            if args.only not in (None, mode):
                continue
            a = ours(args.first, args.model, args.threads, mode, options)
            b = peer(args.model, args.threads, mode, options)
            what = mode + " " + " ".join(f"{k}={v}" for k, v in options.items())
            ratio = a["tokens_per_second"] / b["tokens_per_second"]
            print(f"{what:34} {a['tokens_per_second']:12.1f} {b['tokens_per_second']:12.1f} {ratio:8.2f}x "
                  f"{a['peak_mib']:9.0f} {b['peak_mib']:9.0f}", flush=True)


if __name__ == "__main__":
    main()
