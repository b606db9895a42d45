#!/usr/bin/env python3
"""The step of bench/transformer_step_cuda.cu in PyTorch: same model, same batch a GPU. Prints JSON.

Needs PyTorch with CUDA (pip install torch). torch.compile, bfloat16 autocast over float weights, SDPA, fused AdamW,
clip_grad_norm_, TF32 allowed: the fastest of the ways PyTorch offers without changing the model. Under torchrun it is
DistributedDataParallel, a process a GPU, and --hook says how gradients travel; or FSDP2, which shards.
"""
import argparse
import json
import os
import statistics
import sys
import time

import torch
import torch.distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from transformer_step_torch import Transformer  # beside this file


def peak_of(card):
    for name, flops in (("H100 PCIe", 756e12), ("H100 NVL", 835e12), ("H200 NVL", 836e12), ("H100", 989e12),
                        ("H200", 989e12), ("A100", 312e12)):
        if name in card:
            return flops
    return None


def sharded(model, free_values):
    """Parameters, gradients and optimizer state shared out among torchrun's world, block by block."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    how = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
           "reshard_after_forward": free_values}
    for block in model.blocks:
        fully_shard(block, **how)
    return fully_shard(model, **how)


def distributed(model, device, hook):
    """The model as a replica of torchrun's world."""
    if hook in ("fsdp2", "fsdp3"):
        return sharded(model, hook == "fsdp3")
    replica = torch.nn.parallel.DistributedDataParallel(
        model, device_ids=[device] if device.type == "cuda" else None, gradient_as_bucket_view=True)
    if hook == "bf16":
        replica.register_comm_hook(None, default_hooks.bf16_compress_hook)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
        replica.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return replica


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=10, help="steps before them")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--hook", choices=["none", "bf16", "powersgd", "fsdp2", "fsdp3"], default="none",
                        help="under torchrun: gradients as they are, in bfloat16, or by PowerSGD of rank 4; or FSDP2, "
                             "fsdp3 frees values behind forward")
    parser.add_argument("--nodes", type=int, default=0,
                        help="under torchrun: let NCCL take the processes for those of so many machines")
    parser.add_argument("--device", default="cuda", help="cpu: to try the program out")
    o = parser.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if o.nodes:
        os.environ["NCCL_HOSTID"] = f"node {rank * o.nodes // world}"

    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    device = torch.device(o.device, int(os.environ.get("LOCAL_RANK", 0)) if o.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1:
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    # Rows that no token has make the products as fast as they can be; they are not counted as parameters.
    padded = (o.vocabulary + 127) // 128 * 128
    model = Transformer(padded, o.context, o.layers, o.heads, o.width).to(device)
    replica = distributed(model, device, o.hook) if world > 1 else model
    decayed = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                                  lr=6e-4, betas=(0.9, 0.95), fused=True)
    run = replica if o.eager else torch.compile(replica)
    torch.manual_seed(2 + rank)
    text = torch.randint(0, o.vocabulary, (1 << 22,), device=device)
    offsets = torch.arange(o.context + 1, device=device)

    step_times = []
    loss_value = 0.0
    first_loss = None
    before = time.perf_counter()
    for i in range(-o.warmup, o.steps):
        at = torch.randint(len(text) - o.context - 1, (o.batch, 1), device=device)
        sample = text[at + offsets]
        with torch.autocast(device.type, dtype=torch.bfloat16):
            loss = run(sample[:, :-1].contiguous(), sample[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss_value = loss.item()  # a trainer wants to know it, and the next step may not start unbounded
        now = time.perf_counter()
        if first_loss is None:
            first_loss = loss_value
        if i >= 0:
            step_times.append(now - before)
        before = now
    if device.type == "cuda":
        torch.cuda.synchronize()
    if world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    if rank != 0:
        return

    parameters = sum(p.numel() for p in model.parameters()) - (padded - o.vocabulary) * o.width
    per_token = 6 * parameters + 6 * o.layers * o.context * o.width
    tokens = o.batch * o.context * world
    step = statistics.median(step_times)
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    peak = peak_of(card)
    json.dump({
        "bench": "transformer_step_cuda_torch",
        "command": " ".join(["transformer_step_cuda_torch.py"] + sys.argv[1:]),
        "device": card,
        "configuration": {"vocabulary": o.vocabulary, "layers": o.layers, "heads": o.heads, "width": o.width,
                          "context": o.context, "batch": o.batch, "gpus": world, "hook": o.hook, "compile": not o.eager,
                          "precision": "bf16 autocast"},
        "parameters": parameters,
        "warmup": o.warmup,
        "steps": o.steps,
        "step_milliseconds": {"median": 1e3 * step, "min": 1e3 * min(step_times)},
        "tokens_per_second": tokens / step,
        "model_flops_per_second": per_token * tokens / step,
        "model_flop_utilization": None if peak is None else per_token * tokens / step / peak / world,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
        "loss": {"first": first_loss, "last": loss_value},
        "environment": {"torch": torch.__version__, "cuda": torch.version.cuda,
                        "cudnn": torch.backends.cudnn.version()},
    }, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
