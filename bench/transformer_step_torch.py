#!/usr/bin/env python3
"""The step of bench/transformer_step.cpp in plain PyTorch: same model, same batch, one thread. Prints JSON.

Needs PyTorch (pip install torch). The fastest of the ways PyTorch offers counts: run it with
--optimizer default|foreach|fused and with --compile.
"""
import argparse
import json
import platform
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        shape = (batch, length, self.heads, width // self.heads)
        q, k, v = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).split(width, dim=2))
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.contract(functional.gelu(self.expand(self.norm2(x)), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self, vocabulary, context, layers, heads, width):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, x, targets):
        h = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        logits = functional.linear(self.norm(h), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def processor_name():
    with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=12)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--optimizer", choices=["default", "foreach", "fused"], default="default")
    parser.add_argument("--compile", action="store_true")
    o = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = Transformer(256, o.context, o.layers, o.heads, o.width)
    how = {"default": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}[o.optimizer]
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                                  lr=1e-3, betas=(0.9, 0.99), **how)
    run = torch.compile(model) if o.compile else model
    text = torch.randint(0, 256, (1 << 20,))
    a, b = torch.full((512, 512), 0.5), torch.full((512, 512), 0.25)
    c = torch.empty(512, 512)

    step_times, product_times = [], []
    for i in range(-10, o.steps):
        begin = time.perf_counter()
        at = torch.randint(len(text) - o.context, (o.batch,)).tolist()
        x = torch.stack([text[j:j + o.context] for j in at])
        y = torch.stack([text[j + 1:j + o.context + 1] for j in at])
        loss = run(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        middle = time.perf_counter()
        torch.mm(a, b, out=c)
        end = time.perf_counter()
        if i >= 0:
            step_times.append(middle - begin)
            product_times.append(end - middle)

    weights = o.layers * 12 * o.width ** 2 + 256 * o.width
    per_token = 6 * weights + 12 * o.layers * o.context * o.width
    tokens = o.batch * o.context
    step = statistics.median(step_times)
    model_rate = per_token * tokens / step
    product_rate = 2 * 512 ** 3 / statistics.median(product_times)
    json.dump({
        "bench": "transformer_step_torch",
        "command": " ".join(["transformer_step_torch.py"] + sys.argv[1:]),
        "configuration": {"layers": o.layers, "heads": o.heads, "width": o.width, "context": o.context,
                          "batch": o.batch, "precision": "float"},
        "steps": o.steps,
        "step_milliseconds": {"median": 1e3 * step, "min": 1e3 * min(step_times)},
        "tokens_per_second": tokens / step,
        "model_flops_per_token": per_token,
        "model_gflops": model_rate / 1e9,
        "sgemm_512_gflops": product_rate / 1e9,
        "share_of_sgemm": model_rate / product_rate,
        "environment": {"processor": processor_name(), "torch": torch.__version__, "python": platform.python_version()},
    }, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
