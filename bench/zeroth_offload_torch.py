#!/usr/bin/env python3
"""Zeroth-order steps with offloaded blocks by the public zo2: the counterpart of zeroth_offload.cu.

Needs PyTorch with CUDA, and zo2 (https://github.com/liangyuwang/zo2) in PYTHONPATH, whose nanoGPT path is run as it is: its
configurations of OPT's sizes, float16, one sample of 2048 random tokens, blocks on the host, weights written back every
step. The package's own __init__ is passed by, since it imports its Hugging Face part, which wants an old version of that
library; and first weights are a tile of normals, since billions of them take minutes on a CPU. Neither is in what is timed.
With --ours a program bench_zeroth_offload runs after it on the same card, and a table sets both side by side. Prints JSON.
"""
import argparse
import gc
import importlib.machinery
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types

import torch

from transformer_peers import spoken  # beside this file

MODELS = {"opt-1.3b": "opt_1_3b", "opt-6.7b": "opt_6_7b", "opt-13b": "opt_13b"}


def import_zo2():
    """The nanoGPT path and its configuration; None where there is no zo2."""
    spec = importlib.machinery.PathFinder.find_spec("zo2")
    if spec is None or not spec.submodule_search_locations:
        return None
    package = types.ModuleType("zo2")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["zo2"] = package
    from zo2.config.mezo_sgd import MeZOSGDConfig
    from zo2.model.nanogpt.mezo_sgd import get_nanogpt_mezo_sgd
    from zo2.model.nanogpt.model import GPTConfigs
    return MeZOSGDConfig, get_nanogpt_mezo_sgd, GPTConfigs


def tile_first_weights():
    tile = (0.02 * torch.randn(1 << 20)).half()

    def fill(tensor, *_, **__):
        with torch.no_grad():
            flat = tensor.view(-1)
            for at in range(0, flat.numel(), tile.numel()):
                part = flat[at:at + tile.numel()]
                part.copy_(tile[:part.numel()])
        return tensor

    for name in ("normal_", "uniform_", "kaiming_uniform_"):
        setattr(torch.nn.init, name, fill)


def measure(zo2, model, tokens, steps, untimed):
    MeZOSGDConfig, get_nanogpt_mezo_sgd, GPTConfigs = zo2
    shape = getattr(GPTConfigs(), MODELS[model])
    config = MeZOSGDConfig(lr=1e-7, weight_decay=0.0, eps=1e-3, offloading_device="cpu", working_device="cuda:0")
    config.zo2 = True
    torch.set_default_dtype(torch.float16)
    network = get_nanogpt_mezo_sgd(config)(shape, config)
    torch.set_default_dtype(torch.float32)
    text = torch.randint(0, shape.vocab_size, (1, tokens + 1), device="cuda:0")
    place = torch.arange(tokens, device="cuda:0").unsqueeze(0)
    torch.cuda.reset_peak_memory_stats()
    times = []
    for step in range(untimed + steps):
        network.zo_train()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        network(text[:, :-1], place, text[:, 1:])
        torch.cuda.synchronize()
        if step >= untimed:
            times.append(time.perf_counter() - begin)
    parameters = sum(p.numel() for p in network.parameters())
    mean = statistics.mean(times)
    return {"model": model, "parameters": parameters, "step_ms": mean * 1e3, "least_ms": min(times) * 1e3,
            "most_ms": max(times) * 1e3, "tokens_per_s": tokens / mean,
            "peak_device_gib": torch.cuda.max_memory_allocated() / 2**30}


def run_ours(program, model, options):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "ours.json")
        subprocess.run([program, "-m", model, "-J", path] + options, check=True)
        with open(path) as f:
            return json.load(f)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--untimed", type=int, default=3, help="steps before: the first pins the host's pages")
    parser.add_argument("--ours", help="bench_zeroth_offload, run on the same card with what follows --")
    parser.add_argument("-J", "--json", help="write the report here, besides printing it")
    parser.add_argument("options", nargs="*", help="of the program, after --")
    o = parser.parse_args()
    zo2 = import_zo2()
    if zo2 is None:
        sys.exit("zeroth_offload_torch.py: no zo2 in PYTHONPATH: clone https://github.com/liangyuwang/zo2 and name its folder")
    tile_first_weights()
    rows = []
    environment = None
    for model in o.models:
        theirs = measure(zo2, model, o.tokens, o.steps, o.untimed)
        gc.collect()  # the model's cycles
        torch.cuda.empty_cache()
        torch._C._host_emptyCache()
        ours = []
        if o.ours:
            report = run_ours(o.ours, model, o.options)
            environment = report["environment"]
            ours = report["rows"]
            for row in ours:
                row["tokens_over_zo2"] = row["tokens_per_s"] / theirs["tokens_per_s"]
                row["peak_over_zo2"] = row["peak_device_gib"] / theirs["peak_device_gib"]
        rows.append({"model": model, "zo2": theirs, "tutti": ours})
        print(f"{model}: zo2 {theirs['step_ms']:.1f} ms, {theirs['tokens_per_s']:.0f} tokens/s, "
              f"{theirs['peak_device_gib']:.2f} GiB", flush=True)
        for row in ours:
            print(f"{model}: tutti {row['bits']} bits, {row['directions']}, {row['slots']} slots, every "
                  f"{row['write_back_every']}: {row['tokens_per_s']:.0f} tokens/s ({row['tokens_over_zo2']:.2f} x), "
                  f"{row['peak_device_gib']:.2f} GiB", flush=True)
    report = {"bench": "zeroth_offload_torch", "command": spoken(sys.argv), "environment": environment,
              "card": torch.cuda.get_device_name(), "torch": torch.__version__, "tokens": o.tokens, "steps": o.steps,
              "rows": rows}
    text = json.dumps(report, indent=1)
    print(text)
    if o.json:
        with open(o.json, "w") as f:
            f.write(text + "\n")


if __name__ == "__main__":
    main()
