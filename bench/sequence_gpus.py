#!/usr/bin/env python3
"""Attention of a batch of sequences on the GPUs of one machine: tutti's engine beside PyTorch's context parallelism.

Settings, one after the other, each a table; PyTorch is left out without --torch:
  together   the GPUs as one machine
  nodes      the GPUs as --nodes machines: processes that NCCL takes for those of different hosts, sockets between them,
             with its own number of sockets and with sixteen

  bench/sequence_gpus.py --tutti build/release/bench/bench_sequence_attention \\
      --torch bench/sequence_attention_torch.py -J result.json

What is behind -- goes to tutti's program, as in -- --batch one. Needs nvidia-smi.
"""
import argparse
import json
import sys
import tempfile

from transformer_gpus import MANY_SOCKETS, card_of, finish, start, write_measured  # beside this file
from transformer_peers import environment, spoken


def tutti(o, folder, environment, nodes, gpus):
    """A thread a GPU; or, as several nodes, a process a GPU. Its report, which rank 0 prints."""
    line = [o.tutti] + o.rest
    if nodes == 1:
        lines = [line + ["--gpus", str(gpus)]]
    else:
        meeting = tempfile.mkdtemp(dir=folder)
        lines = [line + ["--rank", str(r), "--ranks", str(gpus), "--nodes", str(nodes), "--meeting", meeting]
                 for r in range(gpus)]
    running = [start(line, environment) for line in lines]
    try:
        outputs = [finish(process, line, o.limit) for process, line in zip(running, lines)]
    finally:
        for process in running:
            process.kill()
    return {**json.loads(outputs[0]), "command": spoken(lines[0])}


def torch(o, environment, nodes, gpus):
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(gpus), o.torch,
            "--repetitions", str(o.torch_repetitions), "--nodes", str(0 if nodes == 1 else nodes)]
    report = json.loads(finish(start(line, environment), line, o.limit))
    return {**report, "command": spoken(line)}


def print_table(title, report):
    """Of tutti's rings also what its model said, and the share of messages' time that nothing hid."""
    print(f"\n{title}\n{'kernels':<15}{'batch':<12}{'plan':<20}{'ms':>10}{'tokens/s':>14}{'ideal ms':>10}{'of it':>8}"
          f"{'planned':>10}{'cut':>5}{'exposed':>9}")
    for row in report["rows"]:
        ideal = row["ideal_ms"]
        line = (f"{row.get('kernels', report.get('backend', '')):<15}{row['batch']:<12}"
                f"{row.get('plan', 'context parallel'):<20}{row['ms']['p50']:>10.2f}{row['tokens_per_second']:>14.0f}"
                + (f"{ideal:>10.2f}{row['of_ideal_time']:>8.3f}" if ideal else f"{'-':>10}{'-':>8}"))
        if "planned_ms" in row:
            sent = row["communication_ms"]
            line += f"{row['planned_ms']:>10.2f}{row['cut_sequences']:>5}"
            line += f"{row['exposed_ms'] / sent:>9.2f}" if sent else f"{'-':>9}"
        print(line, flush=True)


def measure(o, folder):
    card = card_of(o)
    known = {"together": [("together", {}, 1)],
             "nodes": [(f"{o.nodes} nodes", {}, o.nodes), (f"{o.nodes} nodes, 16 sockets", MANY_SOCKETS, o.nodes)]}
    tables = {}
    for title, environment, nodes in [entry for name in o.settings for entry in known[name]]:
        tables[title] = {"tutti": tutti(o, folder, environment, nodes, o.gpus)}
        print_table(f"tutti, {title}", tables[title]["tutti"])
        if o.torch:
            tables[title]["PyTorch"] = torch(o, environment, nodes, o.gpus)
            print_table(f"PyTorch, {title}", tables[title]["PyTorch"])
    return {"bench": "sequence_gpus", "command": spoken(sys.argv),
            "device": card, "gpus": o.gpus, "nodes": o.nodes, "tables": tables,
            "environment": environment()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tutti", metavar="PATH", required=True, help="bench_sequence_attention")
    parser.add_argument("--torch", metavar="PATH", help="sequence_attention_torch.py, run by this very Python")
    parser.add_argument("--torch-repetitions", type=int, default=7)
    parser.add_argument("--settings", nargs="+", choices=["together", "nodes"], default=["together", "nodes"])
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--limit", type=int, default=300, help="seconds that one run may take")
    parser.add_argument("-J", "--json", metavar="PATH", help="write the report here")
    parser.add_argument("rest", nargs="*", help="behind --: options of tutti's program")
    write_measured(parser.parse_args(), "sequence_gpus.py", measure, ("gpus", "nodes", "limit", "torch-repetitions"))


if __name__ == "__main__":
    main()
