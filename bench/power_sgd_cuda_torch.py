#!/usr/bin/env python3
"""PowerSGD's computation on GPT-2's matrices by PyTorch's DDP communication hook: the counterpart of power_sgd_cuda.cu.

Needs PyTorch with CUDA (pip install torch). One process, world size 1: its collectives send nothing. The hook is called
as DDP calls it, with buckets of up to 25 MiB (the first 1 MiB) of gradients in reverse order of the parameters; all are
started, then waited for. Warm start and error feedback on. Prints JSON.
"""
import argparse
import json
import os
import statistics
import sys

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd


class Bucket:
    """What the hook asks of a dist.GradBucket."""

    def __init__(self, index, last, shapes, device):
        self._index, self._last = index, last
        sizes = [a * b for a, b in shapes]
        self._buffer = torch.empty(sum(sizes), device=device)
        self._gradients, at = [], 0
        for shape, size in zip(shapes, sizes):
            self._gradients.append(self._buffer[at:at + size].view(shape))
            at += size

    def index(self):
        return self._index

    def buffer(self):
        return self._buffer

    def set_buffer(self, tensor):
        self._buffer = tensor

    def gradients(self):
        return self._gradients

    def parameters(self):
        return self._gradients

    def is_last(self):
        return self._last


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    o = parser.parse_args()

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29577")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", rank=0, world_size=1)

    w = o.width
    shapes = [(50257, w), (1024, w)] + [(w, 3 * w), (w, w), (w, 4 * w), (4 * w, w)] * o.layers
    parts, size, limit = [[]], 0, 1 << 20
    for shape in reversed(shapes):
        if parts[-1] and size + 4 * shape[0] * shape[1] > limit:
            parts.append([])
            size, limit = 0, 25 << 20
        parts[-1].append(shape)
        size += 4 * shape[0] * shape[1]
    buckets = [Bucket(i, i + 1 == len(parts), part, device) for i, part in enumerate(parts)]
    gradients = [torch.randn_like(b.buffer()) * 1e-3 for b in buckets]

    rows = []
    for rank in o.ranks:
        state = powersgd.PowerSGDState(process_group=None, matrix_approximation_rank=rank, start_powerSGD_iter=2,
                                       warm_start=True, use_error_feedback=True)
        times = []
        for step in range(-6, o.samples):
            for b, g in zip(buckets, gradients):
                b.buffer().copy_(g)  # the hook leaves its result there
            torch.cuda.synchronize()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for future in [powersgd.powerSGD_hook(state, b) for b in buckets]:
                future.wait()
            end.record()
            torch.cuda.synchronize()
            if step >= 0:
                times.append(begin.elapsed_time(end))
        rows.append({"rank": rank, "step_ms": {"min": min(times), "p50": statistics.median(times),
                                               "max": max(times)}})
        print(f"rank {rank:>2}: {statistics.median(times):.3f} ms", file=sys.stderr)
        del state
    json.dump({"bench": "power_sgd_cuda_torch", "command": " ".join(["power_sgd_cuda_torch.py"] + sys.argv[1:]),
               "elements": sum(a * b for a, b in shapes), "buckets": len(buckets), "samples": o.samples, "rows": rows,
               "environment": {"card": torch.cuda.get_device_name(device), "torch": torch.__version__,
                               "cuda": torch.version.cuda}}, sys.stdout, indent=2)
    print()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
