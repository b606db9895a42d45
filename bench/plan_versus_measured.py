#!/usr/bin/env python3
"""The planner beside reality: steps of tutti's trainer at points (tp, pp, dp, micro-batch, ...) on the GPUs of one machine.

A part of the points, chosen by --seed, calibrates the three efficiencies of --machine; the others are predicted. Reported
are the relative errors of those, Kendall's tau over all pairs of points whose times are more than 3 % apart, and whether
a point that ran out of memory was predicted to fit.

  bench/plan_versus_measured.py --tutti build/release/examples/transformer/transformer \\
      --planner build/release/examples/plan_a_job/plan_a_job --gpus 4 -J result.json

--points FILE has a JSON list of points instead of those made for --gpus, each an object of tp, pp, dp, micro_batch,
micro_batches, and as wished zero_stage, schedule, recompute. --measured FILE is a report of an earlier run: nothing is
run, and its times are predicted anew. --save-machine FILE keeps the calibrated machine for plan_a_job --machine.
"""
import argparse
import datetime
import itertools
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

from transformer_gpus import finish, start  # beside this file
from transformer_peers import Failure, find_programs, random_tokens, spoken, write_report

HEADS = {"gpt2-124m": 12, "gpt2-350m": 16, "gpt2-774m": 20, "gpt2-1558m": 25}
LAYERS = {"gpt2-124m": 12, "gpt2-350m": 24, "gpt2-774m": 36, "gpt2-1558m": 48}
SCHEDULES = {"gpipe": "gpipe", "1f1b": "1f1b", "interleaved": "interleaved", "zero_bubble": "zb-h1",
             "zero_bubble_v": "zb-v"}  # the planner's names and the trainer's
BARS = {"median error": 0.05, "worst error": 0.15, "kendall tau": 0.9}


def layouts(o):
    """All (tp, pp, dp) of --gpus that divide the model."""
    counts = range(1, o.gpus + 1)
    return [(tp, pp, dp) for tp, pp, dp in itertools.product(counts, counts, counts)
            if tp * pp * dp == o.gpus and HEADS[o.model] >= tp and LAYERS[o.model] % (2 * pp) == 0]


def too_large(o, folder):
    """Three points that hold 1.2 to 2 times what there is, if the planner is right."""
    tp, pp, dp = layouts(o)[0]  # the one with most data ranks
    point = {"tp": tp, "pp": pp, "dp": dp, "micro_batches": 1, "zero_stage": 1 if dp > 1 else 0, "schedule": "1f1b"}
    one, two = predicted(o, folder, base_machine(o), [{"point": {**point, "micro_batch": n}} for n in (1, 2)])["steps"]
    more = two["memory_gib_per_gpu"] - one["memory_gib_per_gpu"]
    card = subprocess.run(["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"], check=True,
                          capture_output=True, text=True).stdout.split()[0]
    return [{**point, "micro_batch": int(share * int(card) / 1024 / more) + 1} for share in (1.2, 1.5, 2)]


def points_of(o, folder):
    """Each layout with few and with many micro-batches, small and large; on GPUs, points that are too large as well."""
    points = []
    for tp, pp, dp in layouts(o):
        for micro_batch, micro_batches in ((2, 16), (8, 4), (8, 16)):
            schedules = ("1f1b",) if pp == 1 or micro_batches < 16 else ("1f1b", "interleaved", "zero_bubble")
            for schedule in schedules:
                points.append({"tp": tp, "pp": pp, "dp": dp, "micro_batch": micro_batch,
                               "micro_batches": micro_batches, "zero_stage": 1 if dp > 1 else 0, "schedule": schedule})
    return points + (too_large(o, folder) if o.device == "cuda" else [])


def as_job(o, point):
    """A point as plan_a_job reads it."""
    job = {"model": o.model, **point}
    if point["pp"] == 1:
        job["schedule"] = "1f1b"
    elif point.get("schedule") == "interleaved":
        job["chunks"] = 2  # the trainer's
    return job


def run_point(o, folder, point):
    """Seconds of a step, or None where memory ran out; and the command."""
    report = os.path.join(folder, "report.json")
    if os.path.exists(report):
        os.remove(report)
    batch = point["dp"] * point["micro_batch"] * point["micro_batches"]
    line = [o.tutti, "--device", o.device, "--pipeline", "3d", "--tp", str(point["tp"]), "--pp", str(point["pp"]),
            "--dp", str(point["dp"]), "--zero", str(point.get("zero_stage", 0)),
            "--micro-batch", str(point["micro_batch"]), "--batch", str(batch), "--model", o.model,
            "--tokens", os.path.join(folder, "random.bin"), "--validation-tokens", os.path.join(folder, "few.bin"),
            "--steps", str(o.warmup + o.steps),
            "--eval-every", str(o.warmup + o.steps), "--quiet", "--report", report]
    line += ["--gpus" if o.device == "cuda" else "--ranks", str(o.gpus)]
    if point["pp"] > 1:
        line += ["--pipeline-schedule", SCHEDULES[point.get("schedule", "1f1b")]]
    line += ["--recompute", "3" if point.get("recompute") == "full" else "0"]
    try:
        finish(start(line, {}), line, o.limit)
    except Failure as e:
        if "memory" in str(e):
            return None, spoken(line)
        raise
    with open(report, encoding="utf-8") as file:
        steps = json.load(file)["seconds"]["steps"]
    if len(steps) != o.warmup + o.steps:
        raise Failure(f"{shlex.join(line)}: reports {len(steps)} steps instead of {o.warmup} + {o.steps}")
    return statistics.median(steps[o.warmup:]), spoken(line)


def measured(o, folder):
    """Points with what they took, one after the other."""
    if o.measured:
        with open(o.measured, encoding="utf-8") as file:
            earlier = json.load(file)
        o.model = earlier["model"]
        return [{key: p[key] for key in ("point", "seconds", "command")} for p in earlier["points"]]
    random_tokens(os.path.join(folder, "random.bin"), 4 << 20)
    random_tokens(os.path.join(folder, "few.bin"), 1025)  # what is validated is not measured
    if o.points:
        with open(o.points, encoding="utf-8") as file:
            points = json.load(file)
    else:
        points = points_of(o, folder)
        random.Random(o.seed).shuffle(points)  # so that those within --budget are of all kinds
    rows = []
    begin = time.monotonic()
    for point in points:
        if time.monotonic() - begin > o.budget:
            print(f"{len(points) - len(rows)} of {len(points)} points left out: --budget {o.budget:.0f} is used up")
            break
        seconds, command = run_point(o, folder, point)
        rows.append({"point": point, "seconds": seconds, "command": command})
        print(f"{json.dumps(point)}: {'out of memory' if seconds is None else f'{1e3 * seconds:.1f} ms'}", flush=True)
    return rows


def predicted(o, folder, machine, rows):
    """What plan_a_job says of each row."""
    jobs, machine_file, out = (os.path.join(folder, name) for name in ("jobs.json", "machine.json", "times.json"))
    with open(jobs, "w", encoding="utf-8") as file:
        json.dump({"steps": [as_job(o, row["point"]) for row in rows]}, file)
    with open(machine_file, "w", encoding="utf-8") as file:
        json.dump(machine, file)
    line = [o.planner, "--machine", machine_file, "--predict", jobs, "--report", out]
    finish(start(line, {}), line, o.limit)
    with open(out, encoding="utf-8") as file:
        return json.load(file)


def base_machine(o):
    """--machine, as the content of a file."""
    if not o.machine.endswith(".json"):
        return {"like": o.machine}
    with open(o.machine, encoding="utf-8") as file:
        return json.load(file)


def kendall(pairs):
    """Tau over pairs of (measured, predicted) whose measured times are more than 3 % apart; None without such."""
    concordant = compared = 0
    for (a, b), (c, d) in itertools.combinations(pairs, 2):
        if max(a, c) > 1.03 * min(a, c):
            compared += 1
            concordant += 1 if (a < c) == (b < d) else -1
    return concordant / compared if compared else None


def compare(o, folder):
    rows = measured(o, folder)
    ran = [row for row in rows if row["seconds"] is not None]
    if len(ran) < 4:
        raise Failure(f"{len(ran)} points ran; calibration and prediction need at least 4")
    order = list(range(len(ran)))
    random.Random(o.seed).shuffle(order)
    calibrating = set(order[:max(1, round(o.share * len(ran)))])
    machine = base_machine(o) | {"name": "this machine",
                                 "steps": [as_job(o, row["point"]) | {"seconds": row["seconds"]}
                                           for i, row in enumerate(ran) if i in calibrating]}
    answer = predicted(o, folder, machine, rows)
    for row, step in zip(rows, answer["steps"]):
        row |= {"predicted_seconds": step["seconds_per_step"], "predicted_gib": step["memory_gib_per_gpu"],
                "predicted_to_fit": step["fits"], "seconds_by_part": step["seconds"]}
    for i, row in enumerate(ran):
        row["calibrates"] = i in calibrating
        row["error"] = row["predicted_seconds"] / row["seconds"] - 1
    held_out = [abs(row["error"]) for row in ran if not row["calibrates"]]
    if not held_out:
        raise Failure(f"--share {o.share} leaves no point to predict")
    summary = {
        "median error": statistics.median(held_out), "worst error": max(held_out),
        "kendall tau": kendall([(row["seconds"], row["predicted_seconds"]) for row in ran]),
        "calibrating": len(calibrating), "predicted": len(held_out),
        "out of memory": len(rows) - len(ran),
        "out of memory, predicted to fit": sum(row["seconds"] is None and row["predicted_to_fit"] for row in rows),
        "ran, predicted not to fit": sum(not row["predicted_to_fit"] for row in ran)}
    if o.save_machine:
        with open(o.save_machine, "w", encoding="utf-8") as file:
            json.dump(machine, file, indent=1)
    print_table(rows, summary, answer["machine"])
    return {"bench": "plan_versus_measured", "command": spoken([os.path.basename(sys.argv[0])] + sys.argv[1:]),
            "model": o.model, "machine": answer["machine"], "summary": summary, "points": rows,
            "environment": {"date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")}}


def print_table(rows, summary, machine):
    print(f"\n{'tp':>3} {'pp':>3} {'dp':>3} {'micro':>9} {'schedule':>13} {'zero':>4} {'ms':>9} {'predicted':>9} {'error':>8}"
          f" {'GiB':>6}")
    for row in rows:
        p = row["point"]
        micro = f"{p['micro_batches']} x {p['micro_batch']}"
        took = "memory" if row["seconds"] is None else f"{1e3 * row['seconds']:.1f}"
        error = "" if row["seconds"] is None else f"{100 * row['error']:+.1f} %"
        print(f"{p['tp']:>3} {p['pp']:>3} {p['dp']:>3} {micro:>9} {p.get('schedule', '1f1b'):>13}"
              f" {p.get('zero_stage', 0):>4} {took:>9} {1e3 * row['predicted_seconds']:>9.1f} {error:>8}"
              f" {row['predicted_gib']:>6.1f}{'' if row.get('calibrates', True) else '  held out'}"
              f"{'' if row['predicted_to_fit'] else '  said not to fit'}")
    print("\n" + ", ".join(f"{key} {machine[key]:.2f}" for key in
                           ("product_efficiency", "memory_efficiency", "link_efficiency")))
    for key, value in summary.items():
        bar = BARS.get(key)
        goal = "" if bar is None else f" (goal: {'at least' if key == 'kendall tau' else 'at most'} {bar})"
        print(f"{key}: {format(value, '.3f') if isinstance(value, float) else value}{goal}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tutti", metavar="PATH", help="the trainer")
    parser.add_argument("--planner", metavar="PATH", required=True, help="plan_a_job")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, default=4, help="ranks")
    parser.add_argument("--model", choices=sorted(HEADS), default="gpt2-1558m")
    parser.add_argument("--machine", default="hgx-h200", help="a name, or plan_a_job's JSON file, whose efficiencies are "
                                                              "calibrated (%(default)s)")
    parser.add_argument("--points", metavar="FILE")
    parser.add_argument("--measured", metavar="FILE")
    parser.add_argument("--save-machine", metavar="FILE")
    parser.add_argument("--share", type=float, default=0.7, help="of the points that calibrate (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of their choice")
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a point")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them")
    parser.add_argument("--budget", type=float, default=3600, help="seconds after which no further point is run")
    parser.add_argument("--limit", type=int, default=300, help="seconds of one run")
    parser.add_argument("-J", "--json", metavar="PATH", help="write the report here")
    o = parser.parse_args()
    try:
        if min(o.gpus, o.steps, o.warmup) < 1:
            raise Failure("--gpus, --steps and --warmup are at least 1")
        if not o.tutti and not o.measured:
            raise Failure("give --tutti, or --measured with an earlier report")
        find_programs(o, "tutti", "planner")
        with tempfile.TemporaryDirectory() as folder:
            write_report(o, compare(o, folder))
    except (Failure, OSError, ValueError, KeyError, subprocess.CalledProcessError) as e:
        sys.exit(f"plan_versus_measured.py: {e!r}" if isinstance(e, KeyError) else f"plan_versus_measured.py: {e}")


if __name__ == "__main__":
    main()
