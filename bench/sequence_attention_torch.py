#!/usr/bin/env python3
"""The batches of bench/sequence_attention.cu in PyTorch: context parallelism, a call a sequence. Prints JSON.

Needs PyTorch with CUDA (pip install torch); runs under torchrun, a process a GPU. Forward and backward of causal
attention in bfloat16 by scaled_dot_product_attention inside of torch.distributed.tensor.experimental.context_parallel,
which cuts every sequence over all GPUs and balances what they compute; beside it one GPU with whole sequences. Lengths
have to be multiples of twice the number of GPUs: there is no form for others, so batches drawn from histograms are
left out. Times are of the slowest GPU.
"""
import argparse
import contextlib
import json
import os
import statistics
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def batches(tokens):
    def of(*shares):
        return [tokens * n // 64 for n in shares]
    return {"one": of(64), "mix A": of(32, 16, 8, 4, 1, 1, 1, 1),
            "mix B": of(*[8] * 4, *[4] * 4, *[2] * 4, *[1] * 8)}


def timed(sequences, o):
    """Milliseconds of each repetition, by events; forward of all sequences, then backward of all."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(o.repetitions + 1)]
    grouped = {"enable_gqa": True} if o.query_heads != o.kv_heads else {}
    for i in range(-2, o.repetitions):
        if i == 0:
            torch.cuda.synchronize()
            dist.barrier()
            marks[0].record()
        outs = [F.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped) for q, k, v, _ in sequences]
        for out, (q, k, v, d_out) in zip(outs, sequences):
            torch.autograd.grad(out, (q, k, v), d_out)
        if i >= 0:
            marks[i + 1].record()
    torch.cuda.synchronize()
    times = torch.tensor([a.elapsed_time(b) for a, b in zip(marks, marks[1:])], device="cuda")
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()


def random_sequences(lengths, o):
    def numbers(heads, n):
        return torch.rand(1, heads, n, o.width, device="cuda").mul_(2).sub_(1).bfloat16()
    return [(numbers(o.query_heads, n), numbers(o.kv_heads, n), numbers(o.kv_heads, n), numbers(o.query_heads, n))
            for n in lengths]


def over_all(mesh, buffers):
    """Cuts buffers of one length over all GPUs, and stays that way. Inside of it, attention is over all GPUs."""
    return context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * len(buffers), no_restore_buffers=set(buffers))


def measure(lengths, mesh, o):
    """Milliseconds over all GPUs, or on each by itself where there is no mesh."""
    sequences = random_sequences(lengths, o)
    if mesh is not None:
        for sequence in sequences:
            with over_all(mesh, list(sequence)):
                pass
    for sequence in sequences:
        for t in sequence[:3]:
            t.requires_grad_(True)
    inside = contextlib.nullcontext() if mesh is None else \
        over_all(mesh, [torch.zeros(1, 1, 256 * mesh.size(), 1, device="cuda")])
    with sdpa_kernel([BACKENDS[o.backend]]), inside:
        return timed(sequences, o)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=65536, help="of a batch")
    parser.add_argument("--query-heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=32)
    parser.add_argument("--width", type=int, default=128, help="of a head")
    parser.add_argument("--backend", choices=list(BACKENDS), default="cudnn")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--batch", nargs="+", help="one, 'mix A', 'mix B'; all when not given")
    parser.add_argument("--nodes", type=int, default=0, help="let NCCL take the processes for those of so many machines")
    o = parser.parse_args()
    if "RANK" not in os.environ:
        sys.exit("sequence_attention_torch.py: start it by torchrun (python3 -m torch.distributed.run)")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if o.nodes:
        os.environ["NCCL_HOSTID"] = f"node {rank * o.nodes // world}"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    mesh = init_device_mesh("cuda", (world,))
    torch.manual_seed(1 + rank)
    rows = []
    for name, lengths in batches(o.tokens).items():
        if o.batch and name not in o.batch:
            continue
        if any(n % (2 * world) for n in lengths):
            sys.exit(f"sequence_attention_torch.py: {name}: not all of {lengths} are multiples of {2 * world}")
        alone = statistics.median(measure(lengths, None, o))
        times = measure(lengths, mesh, o)
        median = statistics.median(times)
        rows.append({"batch": name, "ms": {"min": min(times), "p50": median, "max": max(times)},
                     "tokens_per_second": sum(lengths) / median * 1e3, "one_gpu_ms": alone, "ideal_ms": alone / world,
                     "of_ideal_time": median / (alone / world)})
        if rank == 0:
            print(f"PyTorch, {o.backend:<8} {name:<8} {median:10.2f} ms, one GPU {alone:10.2f}", file=sys.stderr)
    card = torch.cuda.get_device_name()
    peak = torch.cuda.max_memory_allocated()
    dist.destroy_process_group()
    if rank != 0:
        return
    json.dump({"bench": "sequence_attention_torch",
               "command": " ".join(["sequence_attention_torch.py"] + sys.argv[1:]), "device": card, "gpus": world,
               "nodes": o.nodes or 1, "heads": {"query": o.query_heads, "kv": o.kv_heads, "width": o.width},
               "tokens": o.tokens, "repetitions": o.repetitions, "backend": o.backend, "rows": rows, "peak_bytes": peak,
               "environment": {"torch": torch.__version__, "cuda": torch.version.cuda,
                               "cudnn": torch.backends.cudnn.version()}}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
