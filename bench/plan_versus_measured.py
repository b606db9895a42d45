#!/usr/bin/env python3
"""The planner beside reality: steps of tutti's trainer at given points (tp, pp, dp, micro-batch, ...) on the GPUs of one
machine, what plan_a_job says of them, and where memory ends.

The points are in this file, in the order in which they are run; some are chosen to need more memory than a GPU has. Which of
them calibrate the efficiencies of --machine is decided by --seed before anything is run; the others are predicted. Reported
are the relative errors of those, Kendall's tau over all pairs of points whose times are more than 3 % apart, whether a point
that ran out of memory was predicted to fit, the error of predicted memory, and all that for other choices (--splits).

  bench/measure_machine.py --out machine.json
  bench/plan_versus_measured.py --tutti build/release/examples/transformer/transformer \\
      --planner build/release/examples/plan_a_job/plan_a_job --gpus 2 --machine machine.json -J result.json --picture result.svg

The report is written after every point; --resume goes on from it, and tries points again that failed. --measured FILE is an
earlier report: nothing is run, and its points are predicted anew. --save-machine FILE keeps the calibrated machine for
plan_a_job --machine.
"""
import argparse
import itertools
import json
import math
import os
import random
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from xml.sax.saxutils import escape

from transformer_gpus import finish, start  # beside this file
from transformer_peers import CONTEXT, Failure, environment, find_programs, random_tokens, spoken, write_report

SCHEDULES = {"gpipe": "gpipe", "1f1b": "1f1b", "interleaved": "interleaved", "zero_bubble": "zb-h1",
             "zero_bubble_v": "zb-v", "dual_pipe": "dualpipe"}  # the planner's names and the trainer's
BARS = {"median error": 0.05, "worst error": 0.15, "kendall tau": 0.9}
GIB = 1 << 30


def point(tp, pp, dp, micro_batches, micro_batch, zero_stage=0, schedule="1f1b", recompute="selective", sp=1):
    """`recompute`: of attention's scores alone, or of whole stages, which the trainer calls 3."""
    return {"tp": tp, "pp": pp, "dp": dp, "micro_batches": micro_batches, "micro_batch": micro_batch,
            "zero_stage": zero_stage, "schedule": schedule, "recompute": recompute, **({"sp": sp} if sp > 1 else {})}


# Of GPT-2 1558M on GPUs of 140 GiB, by number of GPUs: 32 sequences a step, or as many at once as fill a GPU to 91 to 95 %.
# The most telling first.
POINTS = {2: [
    point(1, 1, 2, 4, 4, zero_stage=1),
    point(2, 1, 1, 4, 8),
    point(1, 2, 1, 8, 4),
    point(1, 1, 1, 8, 4),
    point(1, 2, 1, 16, 2, schedule="zero_bubble"),
    point(1, 1, 2, 2, 8, zero_stage=3),
    point(1, 1, 1, 1, 43),
    point(2, 1, 1, 1, 76),
    point(1, 2, 1, 8, 4, schedule="interleaved"),
    point(1, 1, 2, 4, 4, zero_stage=2),
    point(1, 1, 1, 32, 1),
    point(1, 2, 1, 16, 2, schedule="gpipe"),
    point(2, 1, 1, 16, 2),
    point(1, 2, 1, 8, 4, recompute="stages"),
    point(1, 1, 2, 2, 8),
    point(1, 1, 1, 4, 8, recompute="stages"),
    point(1, 2, 1, 8, 4, schedule="zero_bubble_v"),
    point(1, 1, 1, 1, 32)], 4: [
    point(2, 1, 2, 4, 4, zero_stage=1),
    point(1, 2, 2, 8, 2, zero_stage=1),
    point(2, 2, 1, 8, 4),
    point(1, 1, 4, 2, 4, zero_stage=1),
    point(4, 1, 1, 4, 8),
    point(1, 4, 1, 16, 2),
    point(2, 1, 2, 1, 78, zero_stage=1),
    point(1, 1, 4, 1, 48, zero_stage=1),
    point(1, 4, 1, 16, 2, schedule="zero_bubble"),
    point(1, 1, 4, 2, 4, zero_stage=3),
    point(1, 2, 2, 8, 2, schedule="interleaved"),
    point(2, 2, 1, 16, 2, schedule="zero_bubble"),
    point(1, 1, 4, 4, 2, zero_stage=2),
    point(2, 2, 1, 8, 4, recompute="stages"),
    point(1, 4, 1, 8, 4, schedule="gpipe"),
    point(2, 1, 2, 8, 2)]}
# Likewise, of 105 to 112 % of the memory; run after EARLY of the others.
TOO_LARGE = {2: [
    point(1, 1, 1, 1, 52),
    point(2, 1, 1, 1, 90),
    point(1, 1, 2, 1, 54, zero_stage=1),
    point(1, 2, 1, 8, 15, schedule="gpipe")], 4: [
    point(1, 1, 4, 1, 56, zero_stage=1),
    point(2, 1, 2, 1, 92, zero_stage=1),
    point(1, 2, 2, 8, 15, schedule="gpipe"),
    point(2, 2, 1, 8, 24, schedule="gpipe")]}
EARLY = 8
# Of two GPUs, to measure where the others have been looked at already.
RESERVE = [
    point(1, 1, 2, 1, 16, zero_stage=1),
    point(1, 2, 1, 16, 2),
    point(2, 1, 1, 8, 4),
    point(1, 1, 2, 4, 4, zero_stage=3),
    point(1, 2, 1, 8, 4, schedule="zero_bubble"),
    point(1, 1, 2, 8, 2, zero_stage=2),
    point(1, 1, 1, 16, 2)]


def gpus_of(p):
    return p["tp"] * p["pp"] * p["dp"] * p.get("sp", 1)


def name_of(p):
    """As in "2 GPUs, pp 2, 1f1b, 8 x 4"."""
    cut = [f"{d} {p[d]}" for d in ("tp", "pp", "dp", "sp") if p.get(d, 1) > 1] or ["1 GPU"]
    return ", ".join(cut + ([p["schedule"]] if p["pp"] > 1 else []) + ([f"ZeRO-{p['zero_stage']}"] if p["zero_stage"] else [])
                     + (["stages recomputed"] if p["recompute"] == "stages" else [])
                     + [f"{p['micro_batches']} x {p['micro_batch']}"])


def calibrating(points, share, seed):
    """The numbers of those that calibrate, not of all: known before anything is measured."""
    order = list(range(len(points)))
    random.Random(seed).shuffle(order)
    return set(order[:min(round(share * len(points)), len(points) - 1)])


def as_job(o, p):
    """A point as plan_a_job reads it."""
    return {"model": o.model, "trainer": "tutti", **p, **({"chunks": 2} if p["schedule"] == "interleaved" else {})}  # chunks: the trainer's


def line_of(o, folder, p):
    """The trainer's command."""
    steps = str(o.warmup + o.steps)
    layout = ["--pipeline", "3d", "--tp", str(p["tp"]), "--pp", str(p["pp"]), "--dp", str(p["dp"]),
              "--zero", str(p["zero_stage"]), "--recompute", "3" if p["recompute"] == "stages" else "0"]
    layout += ["--pipeline-schedule", SCHEDULES[p["schedule"]]] if p["pp"] > 1 else []
    layout += ["--sp", str(p["sp"])] if "sp" in p else []
    return [o.tutti, "--device", "cuda", "--gpus", str(gpus_of(p)), *layout, "--model", o.model,
            "--batch", str(p["dp"] * p["micro_batch"] * p["micro_batches"]), "--micro-batch", str(p["micro_batch"]),
            "--tokens", os.path.join(folder, "random.bin"), "--validation-tokens", os.path.join(folder, "few.bin"),
            "--steps", steps, "--eval-every", steps, "--quiet", "--report", os.path.join(folder, "report.json")]


def run_point(o, folder, p):
    """What was measured of a point: `steps`, all of their seconds, `seconds`, the median of the timed ones, and the memory
    that a rank held at most; or `out_of_memory`, or `failed`, with the trainer's words."""
    line = line_of(o, folder, p)
    report = os.path.join(folder, "report.json")
    if os.path.exists(report):
        os.remove(report)
    # What is validated is not measured; it has the shapes of a step.
    random_tokens(os.path.join(folder, "few.bin"), p["dp"] * p["micro_batch"] * CONTEXT + 1)
    row = {"point": p, "command": spoken(line)}
    begin = time.monotonic()
    try:
        finish(start(line, {}), line, o.limit)
        with open(report, encoding="utf-8") as file:
            said = json.load(file)
        steps = said["seconds"]["steps"]
        if len(steps) != o.warmup + o.steps:
            raise Failure(f"{shlex.join(line)}: reports {len(steps)} steps instead of {o.warmup} + {o.steps}")
        row |= {"steps": steps, "seconds": statistics.median(steps[o.warmup:]),
                "peak_gib": said["peak_bytes_per_rank"] / GIB}
    except Failure as e:
        words = re.sub(r"^.*: ended with status -?\d+: ", "", str(e), flags=re.DOTALL).strip()[-600:]
        row["out_of_memory" if "out of memory" in str(e) else "failed"] = words
    row["run_seconds"] = time.monotonic() - begin
    return row


def earlier(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def asked(o):
    """The points to run, and which of them may calibrate."""
    if o.points:
        points = [point(**p) for p in earlier(o.points)]
        return points, points
    if o.reserve:
        return RESERVE, RESERVE
    if o.gpus not in POINTS:
        raise Failure(f"--gpus {o.gpus}: this file has points for {' and '.join(map(str, POINTS))}; give --points")
    timed = POINTS[o.gpus]
    return timed[:EARLY] + TOO_LARGE[o.gpus] + timed[EARLY:], timed


def measured(o, folder):
    """Rows of the points, one after the other, as far as --budget goes."""
    points, timed = asked(o)
    chosen = [timed[i] for i in calibrating(timed, o.share, o.seed)]
    done = []
    if o.resume and o.json and os.path.exists(o.json):
        begun = earlier(o.json)
        if begun.get("model") != o.model:
            raise Failure(f"--resume: the steps in {o.json} are of {begun.get('model')}, not of {o.model}")
        done = begun["points"]
    random_tokens(os.path.join(folder, "random.bin"), 1 << 20)
    rows = []
    begin = time.monotonic()
    for p in points:
        row = next((row for row in done if row["point"] == p and "failed" not in row), None)
        if row is None and time.monotonic() - begin > o.budget:
            print(f"{name_of(p)}: left out, --budget {o.budget:.0f} is used up", flush=True)
            continue
        row = row or run_point(o, folder, p)
        rows.append(row | {"calibrates": p in chosen})
        write_report(o, {"bench": "plan_versus_measured", "model": o.model, "points": rows})
        print(f"{name_of(p)}: " + (f"{1e3 * row['seconds']:.1f} ms, {row['peak_gib']:.1f} GiB" if "seconds" in row else
                                   row.get("out_of_memory") or f"failed: {row['failed']}")
              + f" ({row['run_seconds']:.1f} s)", flush=True)
    return rows


def machine_of(o):
    """--machine, as the content of a file."""
    return earlier(o.machine) if o.machine.endswith(".json") else {"like": o.machine}


def predicted(o, folder, rows, calibrating_rows):
    """What plan_a_job says of each row, and of the machine, when it is calibrated with some of them."""
    jobs, machine_file, out = (os.path.join(folder, name) for name in ("jobs.json", "machine.json", "times.json"))
    machine = machine_of(o) | {"name": "this machine"}
    if calibrating_rows:
        machine["steps"] = [as_job(o, row["point"]) | {"seconds": row["seconds"]} for row in calibrating_rows]
    for path, content in ((jobs, {"steps": [as_job(o, row["point"]) for row in rows]}), (machine_file, machine)):
        with open(path, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)
    line = [o.planner, "--machine", machine_file, "--predict", jobs, "--margin", str(o.margin), "--report", out]
    finish(start(line, {}), line, o.limit)
    return earlier(out) | {"file": machine}


def kendall(pairs):
    """Tau over pairs of (measured, predicted) whose measured times are more than 3 % apart; None without such."""
    concordant = compared = 0
    for (a, b), (c, d) in itertools.combinations(pairs, 2):
        if max(a, c) > 1.03 * min(a, c):
            compared += 1
            concordant += 1 if (a < c) == (b < d) and b != d else -1
    return concordant / compared if compared else None


def judged(rows, answers, held_out):
    """Errors of the rows of `held_out`, and the order of all."""
    errors = {i: answers[i]["seconds_per_step"] / rows[i]["seconds"] - 1 for i in range(len(rows)) if "seconds" in rows[i]}
    apart = [abs(errors[i]) for i in held_out]
    return {"median error": statistics.median(apart), "worst error": max(apart),
            "kendall tau": kendall([(rows[i]["seconds"], answers[i]["seconds_per_step"]) for i in errors])}


def within(verdict):
    return (verdict["median error"] <= BARS["median error"] and verdict["worst error"] <= BARS["worst error"]
            and (verdict["kendall tau"] or 0) >= BARS["kendall tau"])


def splits(o, folder, rows):
    """Verdicts when other points calibrate: by other seeds, as many of them."""
    ran = [i for i, row in enumerate(rows) if "seconds" in row]
    verdicts = []
    for seed in range(o.splits):
        chosen = {ran[i] for i in calibrating(ran, o.share, seed)}
        answers = predicted(o, folder, rows, [rows[i] for i in sorted(chosen)])["steps"]
        verdicts.append(judged(rows, answers, [i for i in ran if i not in chosen]))
    return {"splits": len(verdicts), "within all goals": sum(map(within, verdicts)),
            "median of median errors": statistics.median(v["median error"] for v in verdicts),
            "largest median error": max(v["median error"] for v in verdicts),
            "median of worst errors": statistics.median(v["worst error"] for v in verdicts),
            "largest worst error": max(v["worst error"] for v in verdicts),
            "least kendall tau": min(v["kendall tau"] or 0 for v in verdicts)}


def compare(o, folder):
    if o.measured:
        report = earlier(o.measured)
        o.model = report["model"]
        everything = report["points"]
    else:
        everything = measured(o, folder)
    rows = [row for row in everything if "failed" not in row]
    ran = [i for i, row in enumerate(rows) if "seconds" in row]
    held_out = [i for i in ran if not rows[i]["calibrates"]]
    if len(ran) - len(held_out) < 2 or not held_out:
        raise Failure(f"{len(ran)} points ran, of which {len(held_out)} do not calibrate: too few to compare")
    alone = predicted(o, folder, rows, [])["steps"]
    answer = predicted(o, folder, rows, [rows[i] for i in ran if rows[i]["calibrates"]])
    for row, step, uncalibrated in zip(rows, answer["steps"], alone):
        row |= {"predicted_seconds": step["seconds_per_step"], "predicted_gib": step["memory_gib_per_gpu"],
                "predicted_to_fit": step["fits"], "seconds_by_part": step["seconds"], "gib_by_part": step["memory_gib"],
                "uncalibrated_seconds": uncalibrated["seconds_per_step"]}
        if "seconds" in row:
            row["error"] = row["predicted_seconds"] / row["seconds"] - 1
            row["memory_error"] = row["predicted_gib"] / row["peak_gib"] - 1
    memory = [abs(rows[i]["memory_error"]) for i in ran]
    summary = judged(rows, answer["steps"], held_out) | {
        "calibrating": len(ran) - len(held_out), "held out": len(held_out),
        "failed otherwise": len(everything) - len(rows), "ran out of memory": len(rows) - len(ran),
        "ran out of memory, predicted to fit": sum("seconds" not in row and row["predicted_to_fit"] for row in rows),
        "ran, predicted not to fit": sum(not rows[i]["predicted_to_fit"] for i in ran),
        "median error of memory": statistics.median(memory), "worst error of memory": max(memory),
        **{f"{key}, calibrated by no step": value for key, value in judged(rows, alone, ran).items()}}
    if o.splits:
        summary |= {"other choices": splits(o, folder, rows)}
    if o.save_machine:
        with open(o.save_machine, "w", encoding="utf-8") as file:
            json.dump(answer["file"], file, indent=1)
    print_table(rows, summary, answer["machine"])
    if o.picture:
        with open(o.picture, "w", encoding="utf-8") as file:
            file.write(svg_of(o, rows, answer["machine"]["memory_bytes"] / GIB))
    return {"bench": "plan_versus_measured", "command": spoken(sys.argv),
            "model": o.model, "seed": o.seed, "share": o.share, "margin": o.margin, "machine": answer["machine"],
            "summary": summary, "points": everything,
            "environment": environment()}


def print_table(rows, summary, machine):
    print(f"\n{'':<44} {'ms':>7} {'planned':>8} {'error':>8} {'GiB':>6} {'planned':>8} {'error':>8}")
    for row in rows:
        ran = "seconds" in row
        took = f"{1e3 * row['seconds']:.1f}" if ran else "-"
        error = f"{100 * row['error']:+.1f} %" if ran else ""
        held = f"{row['peak_gib']:.1f}" if ran else "over"
        apart = f"{100 * row['memory_error']:+.1f} %" if ran else ""
        print(f"{name_of(row['point']):<44} {took:>7} {1e3 * row['predicted_seconds']:>8.1f} {error:>8} {held:>6}"
              f" {row['predicted_gib']:>8.1f} {apart:>8}{'  held out' if ran and not row['calibrates'] else ''}"
              f"{'' if row['predicted_to_fit'] else '  said not to fit'}")
    print("\n" + ", ".join(f"{key} {machine[key]:.3g}" for key in
                           ("product_efficiency", "memory_efficiency", "link_efficiency", "launch_seconds")))
    for key, value in summary.items():
        bar = BARS.get(key)
        goal = "" if bar is None else f" (goal: {'at least' if key == 'kendall tau' else 'at most'} {bar})"
        if isinstance(value, dict):
            value = ", ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in value.items())
        print(f"{key}: {format(value, '.3f') if isinstance(value, float) else value}{goal}")


# What a point's layout is drawn in.
COLORS = {"1 GPU": "#616161", "data": "#1565c0", "tensor": "#2e7d32", "pipeline": "#ef6c00",
          "sequence": "#00838f", "several": "#6a1b9a"}
SIDE, LEFT, TOP, APART = 330, 62, 66, 92


def kind_of(p):
    cut = [kind for kind, d in (("tensor", "tp"), ("pipeline", "pp"), ("data", "dp"), ("sequence", "sp"))
           if p.get(d, 1) > 1]
    return "1 GPU" if not cut else cut[0] if len(cut) == 1 else "several"


class Panel:
    """A square with the same logarithmic axis in both directions."""

    def __init__(self, left, values, ticks, unit):
        self.left, self.low, self.high = left, 0.93 * min(values), 1.07 * max(values)
        at, end = self.x, TOP + SIDE
        self.out = [f'<rect x="{left}" y="{TOP}" width="{SIDE}" height="{SIDE}" fill="none" stroke="#bdbdbd"/>']
        for tick in (t for t in ticks if self.low < t < self.high):
            self.out.append(f'<line x1="{at(tick):.1f}" y1="{TOP}" x2="{at(tick):.1f}" y2="{end}" stroke="#eeeeee"/>'
                            f'<text x="{at(tick):.1f}" y="{end + 15}" text-anchor="middle">{tick:g}</text>'
                            f'<line x1="{left}" y1="{self.y(tick):.1f}" x2="{left + SIDE}" y2="{self.y(tick):.1f}" '
                            f'stroke="#eeeeee"/><text x="{left - 5}" y="{self.y(tick) + 4:.1f}" '
                            f'text-anchor="end">{tick:g}</text>')
        self.out += [f'<text x="{left + SIDE / 2}" y="{end + 32}" text-anchor="middle">measured, {unit}</text>',
                     f'<text transform="translate({left - 40} {TOP + SIDE / 2}) rotate(-90)" '
                     f'text-anchor="middle">planned, {unit}</text>']

    def x(self, value):
        return self.left + SIDE * math.log(value / self.low) / math.log(self.high / self.low)

    def y(self, value):
        return TOP + SIDE - (self.x(value) - self.left)

    def line(self, factor, color, dashes):
        """Where what is planned is a multiple of what is measured."""
        from_x, to_x = self.low / min(1, factor), self.high / max(1, factor)
        self.out.append(f'<line x1="{self.x(from_x):.1f}" y1="{self.y(from_x * factor):.1f}" x2="{self.x(to_x):.1f}" '
                        f'y2="{self.y(to_x * factor):.1f}" stroke="{color}" stroke-dasharray="{dashes}"/>')

    def dot(self, row, x, y):
        p, color = row["point"], COLORS[kind_of(row["point"])]
        fill = "white" if row["calibrates"] else color
        self.out.append(f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="4.5" fill="{fill}" stroke="{color}" '
                        f'stroke-width="1.6"><title>{escape(name_of(p))}</title></circle>')


def svg_of(o, rows, limit):
    """Planned against measured: times and memory. Points that calibrated are hollow; crosses ran out of memory."""
    ran, over = [row for row in rows if "seconds" in row], [row for row in rows if "seconds" not in row]
    times = [1e3 * value for row in ran for value in (row["seconds"], row["predicted_seconds"])]
    memory = [value for row in ran for value in (row["peak_gib"], row["predicted_gib"])] + [limit]
    left = Panel(LEFT, times, (20, 50, 100, 200, 300, 400, 500, 700, 1000, 1500, 2000, 5000), "ms a step")
    right = Panel(LEFT + SIDE + APART, memory + [row["predicted_gib"] for row in over],
                  (2, 5, 10, 20, 30, 40, 60, 80, 100, 150, 200), "GiB a GPU")
    for panel in (left, right):
        panel.line(1, "#9e9e9e", "none")
        for factor in (0.95, 1.05):
            panel.line(factor, "#bdbdbd", "3 3")
    for row in ran:
        left.dot(row, 1e3 * row["seconds"], 1e3 * row["predicted_seconds"])
        right.dot(row, row["peak_gib"], row["predicted_gib"])
    x = right.x(limit)
    right.out.append(f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{TOP + SIDE}" stroke="#c62828"/>'
                     f'<text x="{x - 4:.1f}" y="{TOP + SIDE - 8}" text-anchor="end" fill="#c62828">a GPU has '
                     f'{limit:.0f}</text>')
    for i, row in enumerate(over):  # it needs more than there is; how much more is not known
        x, y = right.x(limit) + 7 + 9 * i % 36, right.y(row["predicted_gib"])
        right.out.append(f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8" stroke="{COLORS[kind_of(row["point"])]}" '
                         f'stroke-width="1.8"><title>{escape(name_of(row["point"]))}</title></path>')
    width, height = right.left + SIDE + 24, TOP + SIDE + 44
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
           'font-family="sans-serif" font-size="11">', f'<rect width="{width}" height="{height}" fill="white"/>',
           f'<text x="12" y="20" font-size="14">Steps of {escape(o.model)}, planned and measured; dashes: 5 % apart</text>']
    kinds = [kind for kind in COLORS if any(kind_of(row["point"]) == kind for row in rows)]
    for i, kind in enumerate(kinds):
        out.append(f'<circle cx="{LEFT + 6 + 90 * i}" cy="42" r="4.5" fill="{COLORS[kind]}"/>'
                   f'<text x="{LEFT + 16 + 90 * i}" y="46">{kind}</text>')
    at = LEFT + 90 * len(kinds)
    out.append(f'<text x="{at}" y="46">hollow: calibrates; cross: ran out of memory</text>')
    return "\n".join(out + left.out + right.out + ["</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tutti", metavar="PATH", help="the trainer")
    parser.add_argument("--planner", metavar="PATH", required=True, help="plan_a_job")
    parser.add_argument("--gpus", type=int, default=2, help="whose points of this file are run (%(default)s)")
    parser.add_argument("--model", default="gpt2-1558m")
    parser.add_argument("--machine", default="hgx-h200", help="a name, or plan_a_job's JSON file, whose efficiencies are "
                                                              "calibrated (%(default)s)")
    parser.add_argument("--margin", type=float, default=0.03,
                        help="share of the memory that CUDA, NCCL and other libraries take (%(default)s)")
    parser.add_argument("--points", metavar="FILE", help="a JSON list of points instead of those of this file, each of tp, pp, "
                                                         "dp, micro_batches, micro_batch, and as wished sp, zero_stage, "
                                                         "schedule, recompute")
    parser.add_argument("--reserve", action="store_true", help="the points of this file that are kept in reserve")
    parser.add_argument("--measured", metavar="FILE")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--save-machine", metavar="FILE")
    parser.add_argument("--share", type=float, default=0.7, help="of the points that calibrate (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of their choice (%(default)s)")
    parser.add_argument("--splits", type=int, default=20, help="other choices, whose spread is reported (%(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a point (%(default)s)")
    parser.add_argument("--warmup", type=int, default=1, help="steps before them (%(default)s)")
    parser.add_argument("--budget", type=float, default=3600, help="seconds after which no further point is begun")
    parser.add_argument("--limit", type=int, default=300, help="seconds of one run")
    parser.add_argument("--picture", metavar="FILE", help="SVG: planned against measured")
    parser.add_argument("-J", "--json", metavar="PATH", help="the report")
    o = parser.parse_args()
    try:
        if min(o.gpus, o.steps, o.warmup) < 1 or o.splits < 0 or not 0 < o.share < 1:
            raise Failure("--gpus, --steps and --warmup are at least 1, --splits is not negative, --share is between 0 and 1")
        if not o.tutti and not o.measured:
            raise Failure("give --tutti, or --measured with an earlier report")
        find_programs(o, "tutti", "planner")
        with tempfile.TemporaryDirectory() as folder:
            write_report(o, compare(o, folder))
    except (Failure, OSError, ValueError, KeyError, TypeError, subprocess.CalledProcessError) as e:
        sys.exit(f"plan_versus_measured.py: {e!r}" if isinstance(e, KeyError) else f"plan_versus_measured.py: {e}")


if __name__ == "__main__":
    main()
