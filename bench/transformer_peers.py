#!/usr/bin/env python3
"""GPT-2 124M's training step on one GPU, in bfloat16: tutti beside torch.compile and llm.c, run in turn on one card.

Needs nvidia-smi and the programs themselves; one that is not given is left out. Every round runs each of them once, for
as many steps, and a ratio is taken between neighbors, within a round. Nothing else may run on the card.

  bench/transformer_peers.py --tutti build/release/bench/bench_transformer_step_cuda --llmc llm.c/train_gpt2cu \\
      --torch bench/transformer_step_cuda_torch.py
"""
import argparse
import array
import datetime
import json
import math
import os
import pathlib
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile

VOCABULARY, CONTEXT, LAYERS, HEADS, WIDTH = 50257, 1024, 12, 12, 768
PARAMETERS = (VOCABULARY + CONTEXT) * WIDTH + LAYERS * (12 * WIDTH * WIDTH + 13 * WIDTH) + 2 * WIDTH
FLOPS_PER_TOKEN = 6 * PARAMETERS + 6 * LAYERS * CONTEXT * WIDTH  # of attention, the half that the mask leaves


class Failure(Exception):
    """Its text says what to do."""


class Bench:
    """A program that prints the JSON of transformer_step_cuda: this project's own, or the one in PyTorch."""

    def __init__(self, command):
        self.command = command

    def line(self, o, steps):
        return self.command + ["--steps", str(steps), "--warmup", str(o.warmup), "--batch", str(o.batch)]

    def parse(self, output, o, steps):
        report = json.loads(output)
        if report["parameters"] != PARAMETERS:
            raise ValueError(f"another model: {report['parameters']} parameters instead of {PARAMETERS}")
        if (report["warmup"], report["steps"]) != (o.warmup, steps):
            raise ValueError(f"{report['warmup']} + {report['steps']} steps instead of {o.warmup} + {steps}")
        return {"milliseconds": report["step_milliseconds"]["median"], "loss": report["loss"], "report": report}


class LlmC:
    """llm.c's train_gpt2cu, which prints a line a step with the time between two CUDA events around it."""
    step = re.compile(r"^step +(\d+)/\d+ \| loss +(\S+) .*\| (\d+\.\d+) ms \|", re.MULTILINE)

    def __init__(self, path, arguments, tokens):
        self.command = [path] + arguments
        self.tokens = tokens

    def line(self, o, steps):
        # No sample and no HellaSwag; it insists on a validation text, and reads one batch before and after the steps.
        return self.command + ["-i", self.tokens, "-j", self.tokens, "-e", f"d{LAYERS}", "-b", str(o.batch),
                               "-t", str(CONTEXT), "-d", str(o.batch * CONTEXT), "-x", str(o.warmup + steps),
                               "-l", "6e-4", "-c", "0.1", "-v", "1000000", "-m", "1", "-s", "0", "-h", "0"]

    def parse(self, output, o, steps):
        found = self.step.findall(output)
        if [int(number) for number, _, _ in found] != list(range(1, o.warmup + steps + 1)):
            raise ValueError(f"{len(found)} lines of steps instead of {o.warmup} + {steps}")
        return {"milliseconds": statistics.median(float(time) for _, _, time in found[o.warmup:]),
                "loss": {"first": float(found[0][1]), "last": float(found[-1][1])}}


class Card:
    """What nvidia-smi reads of one card, at once or while a program runs."""
    fields = ("clocks.sm", "power.draw", "temperature.gpu", "utilization.gpu")

    def __init__(self, gpu):
        self.gpu = gpu

    def query(self, fields, *more):
        return ["nvidia-smi", "-i", self.gpu, "--query-gpu=" + ",".join(fields), "--format=csv,noheader,nounits", *more]

    def once(self, *fields):
        return subprocess.run(self.query(fields), check=True, capture_output=True, text=True).stdout.strip()

    def numbers(self, text):
        """A card need not have every field."""
        return {key: float(word) for key, word in zip(self.fields, text.split(", ")) if re.fullmatch(r"[\d.]+", word)}

    def state(self):
        return self.numbers(self.once(*self.fields))

    def run(self, line, environment):
        """Returns the program's result and the medians of what was read while the card was at work."""
        with subprocess.Popen(self.query(self.fields, "-lms", "250"), stdout=subprocess.PIPE, text=True) as watch:
            try:
                done = subprocess.run(line, env=environment, capture_output=True, text=True)
            finally:
                watch.terminate()
            busy = [row for row in map(self.numbers, watch.stdout.read().splitlines())
                    if row.get("utilization.gpu", 0) >= 90]
        return done, {key: statistics.median(row[key] for row in busy) for key in self.fields[:-1]
                      if busy and all(key in row for row in busy)}


def run(name, program, card, o, steps):
    line = program.line(o, steps)
    done, state = card.run(line, {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": o.gpu})
    said = f"{shlex.join(line)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    if done.returncode != 0:
        raise Failure(f"{name}: ended with status {done.returncode}: {said}")
    try:
        result = program.parse(done.stdout, o, steps)
        if not all(math.isfinite(loss) for loss in result["loss"].values()) or not result["milliseconds"] > 0:
            raise ValueError(f"a loss or a time that is not one: {result['loss']}, {result['milliseconds']} ms")
    except (ValueError, KeyError, TypeError) as e:
        raise Failure(f"{name}: cannot read its output ({e!r}): {said}") from e
    return {**result, "card": state}


def random_tokens(path, count):
    """A file of tokens as llm.c reads them: 256 integers (magic, version, count), then 16-bit tokens."""
    with open(path, "wb") as file:
        array.array("i", [20240520, 1, count] + [0] * 253).tofile(file)
        array.array("H", random.Random(1).choices(range(VOCABULARY), k=count)).tofile(file)


def summary(values):
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": values}


def spoken(words):
    """A command line without the folders of one machine."""
    def of_machine(word):
        return os.path.isabs(word) or ("/" in word and os.path.exists(word))
    return shlex.join(os.path.basename(word) if of_machine(word) else word for word in words)


def environment():
    """When a report was made, and of which commit."""
    described = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="],
                               cwd=os.path.dirname(os.path.abspath(__file__)), capture_output=True, text=True)
    return {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "commit": described.stdout.strip() or "unknown"}


def describe(name, program, runs, o, ours):
    """What the report says of one program. tutti_over_it: tutti's tokens/s over its own, round by round."""
    per_step = o.batch * CONTEXT
    speeds = [per_step / (1e-3 * r["milliseconds"]) for r in runs]
    entry = {"command": spoken(program.line(o, o.steps)),
             "step_milliseconds": summary([r["milliseconds"] for r in runs]), "tokens_per_second": summary(speeds),
             "model_flops_per_second": FLOPS_PER_TOKEN * statistics.median(speeds), "loss": runs[-1]["loss"],
             "card": [r["card"] for r in runs]}
    if ours and name != "tutti":
        entry["tutti_over_it"] = summary([r["milliseconds"] / t["milliseconds"] for r, t in zip(runs, ours)])
    report = runs[-1].get("report")
    if report:
        entry["peak_bytes"] = report["peak_bytes"]
        entry["environment"] = {key: value for key, value in report["environment"].items() if key != "affinity"}
    return entry


def peak_of(results):
    """The datasheet's peak of this card, from a program that knows it."""
    for runs in results.values():
        report = runs[-1].get("report")
        if report and report["model_flop_utilization"]:
            return report["model_flops_per_second"] / report["model_flop_utilization"]
    return None


def print_table(programs, peak):
    print(f"\n{'program':<14} {'ms a step: median (min to max)':>32} {'tokens/s':>10} {'TFLOP/s':>8} {'of peak':>8}"
          f" {'tutti over it: median (min to max)':>40}")
    for name, entry in programs.items():
        step, ratio = entry["step_milliseconds"], entry.get("tutti_over_it")
        print(f"{name:<14} {step['median']:>14.2f} ({step['min']:.2f} to {step['max']:.2f})"
              f" {entry['tokens_per_second']['median']:>10.0f} {1e-12 * entry['model_flops_per_second']:>8.1f}"
              f" {format(entry['model_flops_per_second'] / peak, '8.3f') if peak else '-':>8}"
              + (f" {ratio['median']:>22.3f} ({ratio['min']:.3f} to {ratio['max']:.3f})" if ratio else ""))


def in_turn(programs, card, o):
    """The results of every whole round; an interrupt ends it with those there are."""
    results = {name: [] for name in programs}
    order = list(programs)
    try:
        for number in range(o.rounds + 1):  # the first fills PyTorch's cache of kernels, and is not counted
            for name in order:
                result = run(name, programs[name], card, o, o.steps if number else 5)
                if number:
                    results[name].append(result)
                loss, label = result["loss"], f"round {number}" if number else "not counted"
                print(f"{label}: {name} {result['milliseconds']:.2f} ms a step, loss {loss['first']:.3f} to "
                      f"{loss['last']:.3f}, card {result['card']}", flush=True)
            order = order[1:] + order[:1]
    except KeyboardInterrupt:
        whole = min(map(len, results.values()))
        if whole == 0:
            raise
        print(f"interrupted after {whole} of {o.rounds} rounds")
        return {name: runs[:whole] for name, runs in results.items()}
    return results


def measure(o, folder):
    card = Card(o.gpu)
    programs = {}
    if o.tutti:
        programs["tutti"] = Bench([o.tutti])
    if o.torch:
        programs["torch.compile"] = Bench([sys.executable, o.torch])
    if o.llmc:
        tokens = os.path.join(folder, "random.bin")
        random_tokens(tokens, 4 << 20)
        programs["llm.c"] = LlmC(o.llmc, shlex.split(o.llmc_arguments), tokens)
    for name, option in (("tutti", "--tutti"), ("torch.compile", "--torch"), ("llm.c", "--llmc")):
        if name not in programs:
            print(f"{name}: left out, {option} was not given")
    if not programs:
        raise Failure("nothing to run: give --tutti, --torch or --llmc")

    name, driver = card.once("name", "driver_version").split(", ")
    before = card.state()
    if before.get("utilization.gpu", 0) >= 10:
        raise Failure(f"card {o.gpu} is {before['utilization.gpu']:.0f} % busy: wait, or choose another by --gpu")
    print(f"{name}, driver {driver}: {before}")
    results = in_turn(programs, card, o)
    peak = peak_of(results)
    entries = {key: describe(key, programs[key], results[key], o, results.get("tutti")) for key in programs}
    if peak:
        for entry in entries.values():
            entry["model_flop_utilization"] = entry["model_flops_per_second"] / peak
    print_table(entries, peak)
    return {
        "bench": "transformer_peers",
        "command": spoken(sys.argv),
        "device": name,
        "configuration": {"vocabulary": VOCABULARY, "layers": LAYERS, "heads": HEADS, "width": WIDTH,
                          "context": CONTEXT, "batch": o.batch, "precision": "bf16"},
        "parameters": PARAMETERS,
        "model_flops_per_token": FLOPS_PER_TOKEN,
        "warmup": o.warmup,
        "steps": o.steps,
        "programs": entries,
        "note": o.note,
        "environment": {**environment(), "driver": driver, "card_before": before, "card_after": card.state()},
    }


def find_programs(o, *options):
    """Makes the paths that were given absolute. Raises Failure for one without a file."""
    for option in options:
        path = getattr(o, option)
        if path and not pathlib.Path(path).is_file():
            raise Failure(f"--{option}: there is no file {path}")
        if path:
            setattr(o, option, os.path.abspath(path))


def write_report(o, report):
    if o.json:
        pathlib.Path(o.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tutti", metavar="PATH", help="bench_transformer_step_cuda")
    parser.add_argument("--torch", metavar="PATH", help="transformer_step_cuda_torch.py, run by this very Python")
    parser.add_argument("--llmc", metavar="PATH", help="train_gpt2cu of llm.c, built with USE_CUDNN=1")
    parser.add_argument("--llmc-arguments", default="-r 0 -ge 2",
                        help="recomputation and fused GELU (%(default)s); -ge 0 may be as fast")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="timed steps of one program in one round")
    parser.add_argument("--warmup", type=int, default=20, help="steps before them")
    parser.add_argument("--batch", type=int, default=64, help="sequences a step, all at once")
    parser.add_argument("--gpu", default="0", help="as nvidia-smi numbers them")
    parser.add_argument("--note", default="", help="text for the report: versions that no program prints")
    parser.add_argument("-J", "--json", metavar="PATH", help="write the report here")
    o = parser.parse_args()
    try:
        if min(o.rounds, o.steps, o.warmup, o.batch) < 1:
            raise Failure("--rounds, --steps, --warmup and --batch are at least 1")
        find_programs(o, "tutti", "torch", "llmc")
        with tempfile.TemporaryDirectory() as folder:
            report = measure(o, folder)
        write_report(o, report)
    except (Failure, OSError, subprocess.CalledProcessError) as e:
        sys.exit(f"transformer_peers.py: {e}")


if __name__ == "__main__":
    main()
