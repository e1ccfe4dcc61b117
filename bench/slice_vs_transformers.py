#!/usr/bin/env python3
"""The first layers of a published shape in Hugging Face transformers, random weights: the peer of slice_bench on the same GPU.

usage: slice_vs_transformers.py CONFIG.json [--slice-bench PATH] [--layers 4] [--device cuda] [--tokens 8192] [--train 4096]

Needs torch and transformers >= 5.17. With --slice-bench it runs ours first, in the same call, and prints ratios. What the peer
cannot do in the card's memory is said and left out.
"""

import argparse
import json
import re
import subprocess
import tempfile
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText


def slice_of(path, layers):
    """config.json cut to its first layers, as slice_bench cuts it."""
    whole = json.load(open(path))
    text = whole.get("text_config", whole)
    text["num_hidden_layers"] = layers
    text["num_nextn_predict_layers"] = 0
    for key in ("layer_types", "mlp_layer_types", "indexer_types"):
        if key in text:
            text[key] = text[key][:layers]
    for key in ("full_attn_layers", "kda_layers"):
        if key in text.get("linear_attn_config", {}):
            text["linear_attn_config"][key] = [layer for layer in text["linear_attn_config"][key] if layer < layers]
    return whole


def build(path, layers, device):
    with tempfile.TemporaryDirectory() as folder:
        json.dump(slice_of(path, layers), open(f"{folder}/config.json", "w"))
        config = AutoConfig.from_pretrained(folder)
    kind = AutoModelForImageTextToText if config.model_type == "glm5_next" else AutoModelForCausalLM
    torch.manual_seed(1)
    with torch.device(device):
        model = kind.from_config(config, dtype=torch.bfloat16)
    return model.eval()


def seconds(device, work, repeats):
    """The best of some runs after one to warm up."""
    best = float("inf")
    for attempt in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        if attempt > 0:
            best = min(best, time.perf_counter() - start)
    return best


def prefill(model, device, tokens):
    ids = torch.randint(3, model.lm_head.weight.shape[0], (1, tokens), device=device)
    with torch.no_grad():
        return tokens / seconds(device, lambda: model(input_ids=ids, use_cache=False, logits_to_keep=1), 2)


def decode(model, device, context, steps=8):
    ids = torch.randint(3, model.lm_head.weight.shape[0], (1, context), device=device)
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True, logits_to_keep=1).past_key_values
        last = ids[:, -1:]

        def run():
            for _ in range(steps):
                model(input_ids=last, past_key_values=cache, use_cache=True)

        return steps / seconds(device, run, 2)


def train(model, device, tokens):
    model.train()
    model.gradient_checkpointing_enable()
    ids = torch.randint(3, model.lm_head.weight.shape[0], (1, tokens), device=device)

    def run():
        model.zero_grad(set_to_none=True)
        logits = model(input_ids=ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:]).backward()

    return tokens / seconds(device, run, 2)


def ours(path, args):
    """Tokens a second of slice_bench's rows."""
    command = [args.slice_bench, path, "--layers", str(args.layers), "--device", args.device, "--prefill", str(args.tokens),
               "--batches", "1", "--context", str(args.tokens), "--train", str(args.train)]
    rows = {}
    for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
        print("ours: " + line, flush=True)
        if rate := re.search(r"([\d.]+) tokens/s", line):
            rows[line.split()[0].strip(",")] = float(rate[1])
    return rows


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--slice-bench")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--train", type=int, default=4096)
    args = parser.parse_args()
    rates = ours(args.config, args) if args.slice_bench else {}
    model = build(args.config, args.layers, args.device)
    print(f"{args.config}: transformers, {model.config._attn_implementation}, "
          f"{sum(p.numel() for p in model.parameters()) / 1e9:.2f} billion parameters", flush=True)
    for name, work in (("prefill", lambda: prefill(model, args.device, args.tokens)),
                       ("decode", lambda: decode(model, args.device, args.tokens)),
                       ("training", lambda: train(model, args.device, args.train))):
        try:
            rate = work()
        except torch.OutOfMemoryError as error:
            print(f"{name:10} transformers: out of memory: {str(error).splitlines()[0]}", flush=True)
            torch.cuda.empty_cache()
            continue
        ratio = f"  ours {rates[name]:12.1f}, {rates[name] / rate:.2f}x" if name in rates else ""
        print(f"{name:10} transformers {rate:12.1f} tokens/s{ratio}", flush=True)


if __name__ == "__main__":
    main()
