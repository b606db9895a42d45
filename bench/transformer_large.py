#!/usr/bin/env python3
"""The training step of a large GPT-2 in bfloat16 on the GPUs of one machine, the optimizer's state shared among them
(ZeRO-1): tutti's trainer beside llm.c, run in turn.

Every round runs each of them once, for as many steps of as many sequences; a ratio is taken within a round. Utilization
counts the operations that the model needs, of the data sheet's peak. llm.c is built with NCCL and cuDNN; where it asks
for more memory than there is it must stop, not go on in the host's.

  bench/transformer_large.py --tutti build/release/examples/transformer/transformer --llmc llm.c/train_gpt2cu \\
      --gpus 2 -J result.json
"""
import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile

from transformer_gpus import card_of, finish, start, write_measured  # beside this file
from transformer_peers import CONTEXT, Failure, LlmC, environment, find_programs, random_tokens, spoken, summary

DEPTHS = {"gpt2-124m": 12, "gpt2-350m": 24, "gpt2-774m": 36, "gpt2-1558m": 48}


def tutti(o, folder, pipeline):
    """Seconds of the steps, losses, and what the report knows beside them."""
    report = os.path.join(folder, "report.json")
    steps = str(o.warmup + o.steps)
    line = [o.tutti, "--device", "cuda", "--gpus", str(o.gpus), "--model", o.model, "--pipeline", *pipeline.split(),
            "--batch", str(o.batch * o.gpus), "--micro-batch", str(o.micro_batch), "--recompute", str(o.recompute),
            "--tokens", os.path.join(folder, "random.bin"), "--validation-tokens", os.path.join(folder, "few.bin"),
            "--steps", steps, "--eval-every", steps, "--quiet", "--report", report]
    finish(start(line, {}), line, o.limit)
    with open(report, encoding="utf-8") as file:
        r = json.load(file)
    if len(r["seconds"]["steps"]) != o.warmup + o.steps or r["ranks"] != o.gpus:
        raise Failure(f"{shlex.join(line)}: reports {len(r['seconds']['steps'])} steps of {r['ranks']} ranks")
    return {"seconds": r["seconds"]["steps"], "losses": [loss for _, loss in r["loss"]["curve"]],
            "peak_bytes": r["peak_bytes_per_rank"], "command": spoken(line),
            "of_peak": r["model_flop_utilization"] and r["model_flop_utilization"] / r["tokens_per_second"]}


def llmc(o, folder):
    """A process a GPU; the first one speaks."""
    tokens = os.path.join(folder, "random.bin")
    meeting = tempfile.mkdtemp(dir=folder)  # it takes an identity that is left there for its own
    line = [o.llmc, *shlex.split(o.llmc_arguments), "-i", tokens, "-j", tokens, "-e", f"d{DEPTHS[o.model]}",
            "-b", str(o.micro_batch), "-t", str(CONTEXT), "-d", str(o.batch * o.gpus * CONTEXT), "-x",
            str(o.warmup + o.steps), "-l", "1e-3", "-c", "0.1", "-v", "1000000", "-m", "1", "-s", "0", "-h", "0",
            "-z", "1", "-pi", "fs", "-pf", meeting, "-pn", str(o.gpus), "-pg", str(o.gpus), "-pr"]
    lines = [line + [str(rank)] for rank in range(o.gpus)]
    running = [start(each, {}) for each in lines]
    try:
        said = [finish(process, each, o.limit) for process, each in zip(running, lines)][0]
    finally:
        for process in running:
            process.kill()
    found = LlmC.step.findall(said)
    if [int(number) for number, _, _ in found] != list(range(1, o.warmup + o.steps + 1)):
        raise Failure(f"{shlex.join(lines[0])}: cannot read its output: {said[-2000:]}")
    return {"seconds": [1e-3 * float(time) for _, _, time in found], "losses": [float(loss) for _, loss, _ in found],
            "command": spoken(lines[0])}


def in_turn(o, folder):
    """Every program's runs."""
    programs = {f"tutti {pipeline}": lambda pipeline=pipeline: tutti(o, folder, pipeline) for pipeline in o.pipelines}
    if o.llmc:
        programs["llm.c"] = lambda: llmc(o, folder)
    else:
        print("llm.c: left out, --llmc was not given")
    runs = {name: [] for name in programs}
    for number in range(o.rounds):
        for name, run in programs.items():
            runs[name].append(run())
            step = statistics.median(runs[name][-1]["seconds"][o.warmup:])
            print(f"round {number + 1}: {name} {1e3 * step:.1f} ms a step, losses {runs[name][-1]['losses']}", flush=True)
    return runs


def described(o, runs):
    steps = [statistics.median(run["seconds"][o.warmup:]) for run in runs]
    tokens = o.batch * o.gpus * CONTEXT
    return {"command": runs[-1]["command"], "step_milliseconds": summary([1e3 * s for s in steps]),
            "tokens_per_second": summary([tokens / s for s in steps]), "losses": runs[-1]["losses"],
            **({"peak_bytes": runs[-1]["peak_bytes"]} if "peak_bytes" in runs[-1] else {})}


def measure(o, folder):
    find_programs(o, "llmc")
    card = card_of(o)
    random_tokens(os.path.join(folder, "random.bin"), 4 << 20)
    random_tokens(os.path.join(folder, "few.bin"), CONTEXT + 1)  # what is validated is not measured
    runs = in_turn(o, folder)
    of_peak = next((run["of_peak"] for each in runs.values() for run in each if run.get("of_peak")), None)
    programs = {name: described(o, each) for name, each in runs.items()}
    print(f"\n{o.gpus} x {card}, {o.model}, {o.batch} sequences a GPU in parts of {o.micro_batch}\n"
          f"{'':<28} {'ms a step':>10} {'tokens/s':>10} {'of peak':>8} {'llm.c over it':>14} {'peak GB':>8}")
    for name, entry in programs.items():
        speed = entry["tokens_per_second"]["median"]
        if of_peak:
            entry["model_flop_utilization"] = of_peak * speed
        if o.llmc and name != "llm.c":
            entry["llmc_over_it"] = summary([theirs / ours for theirs, ours in
                                             zip(programs["llm.c"]["step_milliseconds"]["rounds"],
                                                 entry["step_milliseconds"]["rounds"])])
        ratio, peak = entry.get("llmc_over_it"), entry.get("peak_bytes")
        print(f"{name:<28} {entry['step_milliseconds']['median']:>10.1f} {speed:>10.0f}"
              f" {format(of_peak * speed, '8.3f') if of_peak else '-':>8}"
              f" {format(ratio['median'], '14.3f') if ratio else '-':>14} {format(peak / 1e9, '8.1f') if peak else '-':>8}")
    return {"bench": "transformer_large", "command": spoken(sys.argv), "device": card, "gpus": o.gpus, "model": o.model, "batch_per_gpu": o.batch,
            "micro_batch": o.micro_batch, "warmup": o.warmup, "steps": o.steps, "programs": programs, "note": o.note,
            "environment": environment()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tutti", metavar="PATH", required=True, help="the trainer, examples/transformer")
    parser.add_argument("--llmc", metavar="PATH", help="train_gpt2cu of llm.c")
    parser.add_argument("--llmc-arguments", default="-r 0 -ge 2", help="recomputation and fused GELU (%(default)s)")
    parser.add_argument("--model", choices=sorted(DEPTHS), default="gpt2-1558m")
    parser.add_argument("--pipelines", nargs="+", default=["zero1"], help="tutti's (%(default)s)")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--batch", type=int, default=128, help="sequences of one GPU and step (%(default)s)")
    parser.add_argument("--micro-batch", type=int, default=16, help="of these, at a time (%(default)s)")
    parser.add_argument("--recompute", type=int, default=0, help="tutti's --recompute")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of one program in one round")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them")
    parser.add_argument("--limit", type=int, default=300, help="seconds that one run may take")
    parser.add_argument("--note", default="", help="text for the report: versions that no program prints")
    parser.add_argument("-J", "--json", metavar="PATH", help="write the report here")
    parser.set_defaults(nodes=1, torch=None)  # for what is shared with transformer_gpus.py
    write_measured(parser.parse_args(), "transformer_large.py", measure,
                   ("gpus", "batch", "micro-batch", "rounds", "steps", "warmup", "limit"))


if __name__ == "__main__":
    main()
