#!/usr/bin/env python3
"""What plan_a_job --machine wants to know of this machine: products, collectives and memory, measured on its GPUs.

Needs PyTorch with CUDA and NCCL. Products are of bfloat16 in the shapes of transformers, many in one CUDA graph, so that the
time is the GPU's and not that of the calls, and of as many buffers as its cache does not hold; collectives, among all GPUs,
and copies are twenty calls in a row. Each figure is the median of --repeats times. plan_a_job fits launches and efficiencies
to them.

  bench/measure_machine.py --like hgx-h200 --out machine.json
  build/release/examples/plan_a_job/plan_a_job --machine machine.json --gpus 4 --model gpt2-1558m
"""
import argparse
import json
import math
import os
import statistics
import sys

SHAPES = [(rows, n, k) for rows in (1024, 4096, 16384)
          for n, k in ((768, 768), (3072, 768), (1600, 1600), (6400, 1600), (1600, 6400), (4096, 4096), (8192, 8192))]
MEBIBYTES = (1, 4, 16, 64, 256)
GRAPH_SECONDS = 2e-3  # of products in a graph, at least: what its own start takes is lost in it


def median_seconds(torch, call, repeats):
    """Of a call among twenty in a row, so that the GPU does not wait for the program."""
    in_a_row = 20
    for _ in range(in_a_row):
        call()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        for _ in range(in_a_row):
            call()
        end.record()
        end.synchronize()
        times.append(1e-3 * begin.elapsed_time(end) / in_a_row)
    return statistics.median(times)


def buffers_of(torch, m, n, k, cache):
    """Operands and results of a product, so often that none is in the cache when it is needed again."""
    size = 2 * (m * k + k * n + m * n)
    return [tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (k, n), (m, n)))
            for _ in range(1 + math.ceil(4 * cache / size))]


def product_seconds(torch, m, n, k, cache, repeats):
    """Of one among the products of a graph, which run one behind the other without the host."""
    buffers = buffers_of(torch, m, n, k, cache)
    rounds = math.ceil(GRAPH_SECONDS * 1e15 / (2 * m * n * k) / len(buffers))  # as if of the fastest of GPUs

    def multiply():
        for a, b, out in buffers:
            torch.matmul(a, b, out=out)
    beside = torch.cuda.Stream()  # what a product needs when it is called first cannot be captured
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        multiply()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            multiply()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    graph.replay()  # while it runs the others are put behind it
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    marks[-1].synchronize()
    return statistics.median(1e-3 * begin.elapsed_time(end) for begin, end in zip(marks, marks[1:])) / (rounds * len(buffers))


def products(torch, repeats):
    # Where PyTorch is too old to say, more than any GPU has.
    cache = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 256 << 20)
    return [{"m": m, "n": n, "k": k, "seconds": product_seconds(torch, m, n, k, cache, repeats)} for m, n, k in SHAPES]


def copy_rate(torch, repeats):
    """Bytes a second, reads and writes counted."""
    a = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    b = torch.empty_like(a)
    return 2 * a.numel() / median_seconds(torch, lambda: b.copy_(a), repeats)


def collectives(rank, gpus, repeats, out):
    import torch
    import torch.distributed as dist
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=gpus)
    rows = []
    for size in MEBIBYTES:
        count = (size << 20) // 2
        whole = torch.zeros(count, device="cuda", dtype=torch.bfloat16)
        part = torch.zeros(count // gpus, device="cuda", dtype=torch.bfloat16)
        cut = whole[:count // gpus * gpus]
        for kind, call in (("all_reduce", lambda: dist.all_reduce(whole)),
                           ("all_gather", lambda: dist.all_gather_into_tensor(cut, part)),
                           ("reduce_scatter", lambda: dist.reduce_scatter_tensor(part, cut))):
            rows.append({"kind": kind, "ranks": gpus, "stride": 1, "bytes": size << 20,
                         "seconds": median_seconds(torch, call, repeats)})
    if rank == 0:
        with open(out, "w", encoding="utf-8") as file:
            json.dump(rows, file)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--like", default="hgx-h200", help="the machine of plan_a_job that has these GPUs (%(default)s): "
                                                           "peaks, and links between nodes, are taken from it")
    parser.add_argument("--name", default="this machine")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", metavar="FILE", required=True)
    o = parser.parse_args()
    try:
        import torch
    except ImportError:
        sys.exit("measure_machine.py: PyTorch is not installed")
    if not torch.cuda.is_available():
        sys.exit("measure_machine.py: PyTorch finds no GPU")
    if o.repeats < 1:
        sys.exit("measure_machine.py: --repeats is at least 1")
    folder = os.path.dirname(os.path.abspath(o.out))
    if os.path.isdir(o.out) or not os.access(o.out if os.path.exists(o.out) else folder, os.W_OK):
        sys.exit(f"measure_machine.py: --out: '{o.out}' cannot be written")  # now, not after all has been measured
    gpus, card = torch.cuda.device_count(), torch.cuda.get_device_properties(0)
    machine = {"name": o.name, "like": o.like, "memory_bytes": card.total_memory, "ranks_per_node": gpus,
               "processors": card.multi_processor_count, "memory_bandwidth": copy_rate(torch, o.repeats),
               "memory_efficiency": 1, "products": products(torch, o.repeats)}
    if gpus > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29511")}
        rows = o.out + ".collectives"
        torch.multiprocessing.spawn(collectives, (gpus, o.repeats, rows), gpus)
        with open(rows, encoding="utf-8") as file:
            machine["collectives"] = json.load(file)
        os.remove(rows)
    with open(o.out, "w", encoding="utf-8") as file:
        json.dump(machine, file, indent=1)
        file.write("\n")
    fastest = max(2 * p["m"] * p["n"] * p["k"] / p["seconds"] for p in machine["products"])
    shortest = min(p["seconds"] for p in machine["products"])
    print(f"{gpus} x {card.name}: products up to {fastest / 1e12:.0f} TFLOP/s, from {1e6 * shortest:.1f} us on, memory "
          f"{machine['memory_bandwidth'] / 1e12:.2f} TB/s", end="")
    if gpus > 1:
        all_reduce = [c for c in machine["collectives"] if c["kind"] == "all_reduce"][-1]
        print(f", all_reduce {2 * (gpus - 1) / gpus * all_reduce['bytes'] / all_reduce['seconds'] / 1e9:.0f} GB/s bus", end="")
    print(f"\n{o.out}")


if __name__ == "__main__":
    main()
