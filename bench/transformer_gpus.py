#!/usr/bin/env python3
"""GPT-2 124M's training step on the GPUs of one machine, in bfloat16: tutti's trainer beside PyTorch's data parallel.

Settings, one after the other, each a table; PyTorch is left out without --torch:
  together   all GPUs as one run, and as many runs of one GPU at the same time: what being together costs
  nodes      the GPUs as --nodes machines: processes that NCCL takes for those of different hosts, sockets between them,
             with its own number of sockets and with sixteen
  sockets    sockets between all GPUs (NCCL_P2P_DISABLE, NCCL_SHM_DISABLE)
  sharded    all GPUs as one run that shares optimizer state, gradients or values, and what it holds at most

A pipeline may have options of its own, as in --pipelines ddp 'co2 --tau auto'. Rounds of local steps are measured over
whole rounds, in five times as many steps.

  bench/transformer_gpus.py --tutti build/release/examples/transformer/transformer \\
      --torch bench/transformer_step_cuda_torch.py -J result.json --traces folder

Needs nvidia-smi, and mpirun (Open MPI) for the settings over sockets. Traces become pictures by `./dev timeline`.
"""
import argparse
import json
import os
import pathlib
import shlex
import statistics
import subprocess
import sys
import tempfile

from transformer_peers import (CONTEXT, PARAMETERS, Failure, environment, find_programs, random_tokens,  # beside this
                               spoken, write_report)

MANY_SOCKETS = {"NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"}
ONLY_SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]


def start(line, environment):
    return subprocess.Popen(line, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            text=True)


def finish(process, line, limit):
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise Failure(f"{shlex.join(line)}: did not end within {limit} s") from None
    if process.returncode != 0:
        raise Failure(f"{shlex.join(line)}: ended with status {process.returncode}: {out[-2000:]}{err[-2000:]}")
    return out


class Tutti:
    """The trainer; it writes its report and its trace into a folder."""

    def __init__(self, o, folder):
        self.o, self.folder, self.count = o, folder, 0

    def steps(self, pipeline):
        return self.o.steps * (5 if "--tau" in pipeline else 1)

    def line(self, gpus, pipeline, processes, nodes=0):
        """The command, and the folder of its results."""
        self.count += 1
        steps = str(self.steps(pipeline))
        results = os.path.join(self.folder, f"run{self.count}")
        line = [self.o.tutti, "--device", "cuda", "--model", "gpt2-124m", "--tokens",
                os.path.join(self.folder, "random.bin"), "--batch", str(self.o.batch * gpus), "--steps",
                steps, "--eval-every", steps, "--pipeline", *pipeline.split(), "--quiet", "--report",
                os.path.join(results, "report.json")]
        if not processes:
            return line + ["--gpus", str(gpus)], results
        if nodes and pipeline.split()[0] in ("ddp-4bit", "ddp-topk", "ddp-lgreco", "co2-zero"):  # the others ask nothing
            line += ["--nodes", str(nodes)]
        inside = gpus // nodes if nodes else gpus
        host = f'NCCL_HOSTID="node $((OMPI_COMM_WORLD_RANK / {inside}))" ' if nodes else ""
        return MPIRUN + ["-n", str(gpus), "sh", "-c", host + 'exec "$0" "$@"'] + line + ["--backend", "nccl"], results

    def read(self, line, results, pipeline):
        with open(os.path.join(results, "report.json"), encoding="utf-8") as file:
            report = json.load(file)
        if report["parameters"] != PARAMETERS or report["steps"] != self.steps(pipeline):
            raise Failure(f"{shlex.join(line)}: reports {report['parameters']} parameters, {report['steps']} steps")
        step, rounds = report["seconds"]["step_median"], report["overlap"]
        exposed = report["seconds"]["exposed_communication"] / report["steps"]
        if rounds["tau"] > 1:  # steps of a round are not alike
            step, exposed = rounds["t_round"] / rounds["tau"], rounds["exposed"] / rounds["tau"]
        return {"tau": rounds["tau"], "peak_bytes": report["peak_bytes_per_rank"],
                "all_reduce_milliseconds": 1e3 * (rounds["t_all_reduce"] or 0), "milliseconds": 1e3 * step,
                "exposed_milliseconds": 1e3 * exposed, "interference": rounds["interference"],
                "outer_update_milliseconds": 1e3 * (rounds["t_outer_update"] or 0),
                "tokens_per_second": report["ranks"] * self.o.batch * CONTEXT / step,
                "compression_ratio": report["compression_ratio"], "loss": report["loss"]["last"],
                "command": spoken(line), "trace": os.path.join(results, "trace.json")}

    def run(self, gpus, environment=None, pipeline="ddp", processes=False, nodes=0):
        line, results = self.line(gpus, pipeline, processes, nodes)
        finish(start(line, environment or {}), line, self.o.limit)
        return self.read(line, results, pipeline)

    def run_apart(self, gpus):
        """As many runs of one GPU at the same time."""
        lines = [self.line(1, "ddp", False) for _ in range(gpus)]
        running = [start(line, {"CUDA_VISIBLE_DEVICES": str(gpu)}) for gpu, (line, _) in enumerate(lines)]
        try:
            for process, (line, _) in zip(running, lines):
                finish(process, line, self.o.limit)
        finally:
            for process in running:
                process.kill()
        runs = [self.read(*line, "ddp") for line in lines]
        return {**runs[0], "milliseconds": statistics.mean(r["milliseconds"] for r in runs),
                "tokens_per_second": sum(r["tokens_per_second"] for r in runs)}


def torch_run(o, environment=None, hook="none", nodes=0):
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(o.gpus), o.torch,
            "--steps", str(o.steps), "--batch", str(o.batch), "--hook", hook, "--nodes", str(nodes)]
    report = json.loads(finish(start(line, environment or {}), line, o.limit))
    if report["parameters"] != PARAMETERS or report["configuration"]["gpus"] != o.gpus:
        raise Failure(f"{shlex.join(line)}: reports {report['parameters']} parameters on "
                      f"{report['configuration']['gpus']} GPUs")
    return {"milliseconds": report["step_milliseconds"]["median"], "tokens_per_second": report["tokens_per_second"],
            "peak_bytes": report["peak_bytes"],
            "loss": report["loss"]["last"], "command": spoken(line)}


def over_a_network(o, tutti, environment, nodes):
    rows = {f"tutti {pipeline}": tutti.run(o.gpus, environment, pipeline, True, nodes) for pipeline in o.pipelines}
    if o.torch:
        for hook in ("none", "bf16", "powersgd"):
            rows[f"PyTorch, hook {hook}"] = torch_run(o, environment, hook, nodes)
    return rows


def settings(o, tutti):
    """Names of settings and how to run them, in order."""
    def together():
        rows = {f"tutti, {o.gpus} runs of one GPU": tutti.run_apart(o.gpus), f"tutti, {o.gpus} GPUs": tutti.run(o.gpus)}
        if o.torch:
            rows["PyTorch, compiled"] = torch_run(o)
        return rows

    def sharded():
        rows = {f"tutti {pipeline}": tutti.run(o.gpus, None, pipeline) for pipeline in ("ddp", "zero1", "zero2", "zero3")}
        if o.torch:
            for hook in ("none", "fsdp2", "fsdp3"):
                rows[f"PyTorch, {'ddp' if hook == 'none' else hook}"] = torch_run(o, hook=hook)
        return rows
    known = {"together": [("together", together)], "sharded": [("sharded", sharded)],
             "nodes": [(f"{o.nodes} nodes", lambda: over_a_network(o, tutti, {}, o.nodes)),
                       (f"{o.nodes} nodes, 16 sockets", lambda: over_a_network(o, tutti, MANY_SOCKETS, o.nodes))],
             "sockets": [("sockets alone", lambda: over_a_network(o, tutti, ONLY_SOCKETS, 0))]}
    return [entry for name in o.settings for entry in known[name]]


def print_table(title, rows, alone):
    print(f"\n{title}\n{'':<28} {'ms a step':>10} {'of one GPU':>11} {'exposed ms':>11} {'tokens/s':>11} {'ratio':>7}"
          f" {'tau':>5} {'peak GB':>8} {'loss':>8}")
    for name, row in rows.items():
        exposed, ratio = row.get("exposed_milliseconds"), row.get("compression_ratio")
        print(f"{name:<28} {row['milliseconds']:>10.1f} {row['milliseconds'] / alone:>11.3f}"
              f" {format(exposed, '11.1f') if exposed is not None else '-':>11} {row['tokens_per_second']:>11.0f}"
              f" {format(ratio, '7.2f') if ratio else '-':>7} {row.get('tau', 1):>5} {row['peak_bytes'] / 1e9:>8.2f}"
              f" {row['loss']:>8.3f}", flush=True)


def card_of(o):
    """The first GPU's name and driver, if there are as many as --gpus and --nodes want."""
    cards = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], check=True,
                           capture_output=True, text=True).stdout.strip().splitlines()
    if len(cards) < o.gpus:
        raise Failure(f"--gpus {o.gpus}: nvidia-smi lists {len(cards)}")
    if o.gpus % o.nodes:
        raise Failure(f"--nodes {o.nodes}: {o.gpus} GPUs cannot be divided among them")
    return cards[0]


def write_measured(o, name, measure, counts):
    """Writes what measure(o, folder) gives; ends the program with one line where that is impossible. `counts`: options
    that are at least 1."""
    try:
        if min(getattr(o, count.replace("-", "_")) for count in counts) < 1:
            options = [f"--{count}" for count in counts]
            raise Failure(f"{', '.join(options[:-1])} and {options[-1]} are at least 1")
        find_programs(o, "tutti", "torch")
        with tempfile.TemporaryDirectory() as folder:
            report = measure(o, folder)
        write_report(o, report)
    except (Failure, OSError, ValueError, KeyError, subprocess.CalledProcessError) as e:
        sys.exit(f"{name}: {e!r}" if isinstance(e, KeyError) else f"{name}: {e}")


def measure(o, folder):
    card = card_of(o)
    random_tokens(os.path.join(folder, "random.bin"), 4 << 20)
    tutti = Tutti(o, folder)
    alone = tutti.run(1)  # the step without communication
    print(f"{o.gpus} x {card}; one GPU alone: {alone['milliseconds']:.1f} ms a step", flush=True)
    tables = {"one GPU": {"tutti": alone}}
    for title, run in settings(o, tutti):
        tables[title] = run()
        print_table(title, tables[title], alone["milliseconds"])
    for rows in tables.values():
        for name, row in rows.items():
            trace = row.pop("trace", None)
            if o.traces and trace:
                pathlib.Path(o.traces).mkdir(parents=True, exist_ok=True)
                kept = "_".join(f"{next(t for t, r in tables.items() if r is rows)} {name}".replace(",", "").split())
                os.replace(trace, os.path.join(o.traces, kept + ".json"))
    return {"bench": "transformer_gpus", "command": spoken(sys.argv),
            "device": card, "gpus": o.gpus, "nodes": o.nodes, "batch_per_gpu": o.batch, "steps": o.steps,
            "tables": tables,
            "environment": environment()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tutti", metavar="PATH", required=True, help="the trainer, examples/transformer")
    parser.add_argument("--torch", metavar="PATH", help="transformer_step_cuda_torch.py, run by this very Python")
    parser.add_argument("--settings", nargs="+", choices=["together", "nodes", "sockets", "sharded"],
                        default=["together", "nodes", "sockets", "sharded"])
    parser.add_argument("--pipelines", nargs="+", default=["ddp", "ddp-4bit", "ddp-powersgd", "slowmo --tau 12", "co2 --tau auto"],
                        help="tutti's, over networks (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="sequences of one GPU and step")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--limit", type=int, default=300, help="seconds that one run may take")
    parser.add_argument("--traces", metavar="FOLDER", help="keep tutti's traces there")
    parser.add_argument("-J", "--json", metavar="PATH", help="write the report here")
    write_measured(parser.parse_args(), "transformer_gpus.py", measure, ("gpus", "nodes", "batch", "steps", "limit"))


if __name__ == "__main__":
    main()
