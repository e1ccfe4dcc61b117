#!/usr/bin/env python3
"""Public kernels at the shapes of our <op>_cuda_bench, on the same GPU: torch's and, where it is installed, fla's (Triton).

usage: kernel_peers.py [--only WORD]

Medians of CUDA events over 20 launches after 5; a row each. Run it beside our benchmarks, in the same call: a card's clock
follows its load.
"""

import argparse

import torch
import torch.nn.functional as F

BF16, F32 = torch.bfloat16, torch.float32


def milliseconds(work, launches=20):
    for _ in range(5):
        work()
    times = []
    for _ in range(launches):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[launches // 2]


def random(*shape, dtype=BF16):
    return torch.randn(shape, device="cuda", dtype=dtype)


def grouped():
    """torch's grouped product: GLM-5's and GLM-5.3-Flash's gate_up, rows dealt to experts at random."""
    for name, experts, k in (("GLM-5", 256, 6144), ("Flash", 288, 4096)):
        w = random(experts, 4096, k)
        for rows in (512, 32768, 131072):
            counts = torch.bincount(torch.randint(experts, (rows,), device="cuda"), minlength=experts)
            ends, x = counts.cumsum(0).to(torch.int32), random(rows, k)
            yield f"grouped product {name}, {rows} rows: torch", lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=ends)
        del w


def head():
    """lm_head of 4096 tokens and the log-softmax after it."""
    h, w = random(4096, 6144), random(154880, 6144)
    yield "lm_head 4096 tokens, H 6144: torch", lambda: h @ w.t()
    logits = h @ w.t()
    yield "log_softmax 4096 x 154880: torch", lambda: F.log_softmax(logits, -1)


def topk():
    for rows, columns in ((2048, 8192), (2048, 32768), (1024, 131072), (64, 65536)):
        scores = random(rows, columns, dtype=F32)
        yield f"top-2048 of {rows} x {columns}: torch", lambda: torch.topk(scores, 2048, sorted=False)


def norms():
    x, w = random(16384, 6144), random(6144)
    yield "RMSNorm 16384 x 6144: torch", lambda: F.rms_norm(x, (6144,), w)
    gate, up = random(16384, 2048), random(16384, 2048)
    yield "SwiGLU 16384 x 2048: torch", lambda: F.silu(gate) * up


def kda():
    try:
        from fla.ops.kda import chunk_kda, fused_recurrent_kda
    except ImportError as error:
        print(f"fla: not installed ({error})")
        return
    heads, width = 64, 128

    def inputs(batch, tokens):
        q, k, v = (random(batch, tokens, heads, width) for _ in range(3))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        g = -5.0 * torch.rand(batch, tokens, heads, width, device="cuda")
        return q, k, v, g, torch.rand(batch, tokens, heads, device="cuda", dtype=BF16)

    with torch.no_grad():
        for batch, tokens in ((1, 4096), (1, 16384), (1, 65536), (8, 1024), (64, 256)):
            args = inputs(batch, tokens)
            yield f"KDA forward {batch} x {tokens}: fla", lambda: chunk_kda(*args, safe_gate=True, lower_bound=-5.0)
        for batch in (1, 64, 256):
            args, state = inputs(batch, 1), random(batch, heads, width, width, dtype=F32)
            yield f"KDA decode, batch {batch}: fla", lambda: fused_recurrent_kda(*args, initial_state=state, output_final_state=True)
    for tokens in (4096, 16384, 65536):
        args = [x.requires_grad_() for x in inputs(1, tokens)]
        do = random(1, tokens, heads, width)
        yield f"KDA forward and backward 1 x {tokens}: fla", lambda: torch.autograd.grad(
            chunk_kda(*args, safe_gate=True, lower_bound=-5.0)[0], args, do)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="rows of functions with this in their name")
    args = parser.parse_args()
    torch.manual_seed(1)
    for group in (grouped, head, topk, norms, kda):
        if args.only not in group.__name__:
            continue
        for name, work in group():
            try:
                print(f"{name:58} {milliseconds(work):9.3f} ms", flush=True)
            except Exception as error:  # a peer that does not run here is said, and the others go on
                print(f"{name:58} does not run: {type(error).__name__}: {str(error).splitlines()[0][:120]}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
