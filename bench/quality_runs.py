"""Many runs of the bundled transformer over four ranks, and a report of what they ended with that is added to.

What the *_quality.py programs share: a plan maps the name of each kind of run to the trainer's options for it; every kind
is run once a seed, and what the report has already is not run again.
"""
import concurrent.futures
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

from transformer_peers import environment, spoken  # beside this file


class Failure(Exception):
    """Its text says what to do."""


def add_arguments(parser, steps):
    parser.add_argument("--trainer", metavar="PATH", help="examples/transformer's program")
    parser.add_argument("--data", metavar="PATH", help="text to train on")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="kinds of runs to run, of those in the table")
    parser.add_argument("--eval-every", type=int, metavar="N", help="steps between validations (default: one, at the end)")
    parser.add_argument("--network", metavar="BANDWIDTH[,LATENCY]", help="of the trainer: as if each rank were a machine")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time; each has four threads")
    parser.add_argument("-J", "--json", metavar="PATH", required=True, help="the report: read, added to and written")
    parser.add_argument("--draw", action="store_true", help="run nothing")


def train(o, options, seed):
    """One run of the trainer: its validation loss and what it sent."""
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.json")
        line = [o.trainer, *options, "--ranks", "4", "--steps", str(o.steps), "--eval-every", str(o.eval_every or o.steps),
                "--data", o.data, "--seed", str(seed), "--quiet", "--report", report]
        if o.network:
            line += ["--network", o.network]
        # Ranks are threads, and each calls BLAS.
        done = subprocess.run(line, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode != 0:
            raise Failure(f"{' '.join(line)}: ended with status {done.returncode}: {done.stderr[-2000:]}")
        with open(report, encoding="utf-8") as file:
            r = json.load(file)
    ended = [0, *itertools.accumulate(r["seconds"]["steps"])]
    return {"seed": seed, "validation_loss": r["loss"]["validation"], "compression_ratio": r["compression_ratio"],
            "bytes_per_step": r["wire_bytes_per_rank_per_step"], "levels": r.get("levels"),
            "validations": [{"tokens": r["tokens"] // r["steps"] * step, "seconds": round(ended[step], 3), "loss": loss}
                            for step, loss in r["loss"]["validations"]]}


def run_all(o, report, plan):
    """Fills in the runs that the report lacks, and keeps it after each of them."""
    missing = []
    for name, options in plan.items():
        if o.only and name not in o.only:
            continue
        entry = report["runs"].setdefault(name, {"options": options, "seeds": []})
        have = {r["seed"] for r in entry["seeds"]}
        missing += [(name, options, seed) for seed in range(1, o.seeds + 1) if seed not in have]
    with concurrent.futures.ThreadPoolExecutor(o.jobs) as pool:
        running = {pool.submit(train, o, options, seed): name for name, options, seed in missing}
        try:
            for count, future in enumerate(concurrent.futures.as_completed(running), 1):
                row, name = future.result(), running[future]
                report["runs"][name]["seeds"] = sorted(report["runs"][name]["seeds"] + [row], key=lambda r: r["seed"])
                print(f"{count}/{len(missing)} {name}, seed {row['seed']}: {row['validation_loss']:.4f}", flush=True)
                keep(o, report)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def keep(o, report):
    path = pathlib.Path(o.json)
    scratch = path.with_name(path.name + ".part")
    scratch.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)


def mean(entry, field):
    return statistics.mean(r[field] for r in entry["seeds"])


def finished(report):
    """The kinds of runs that have results."""
    return {name: entry for name, entry in report["runs"].items() if entry["seeds"]}


def pyplot():
    try:
        import matplotlib
    except ImportError:
        raise Failure("--picture: needs matplotlib (pip install matplotlib)") from None
    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib import pyplot as plots
    return plots


def main(o, name, plan, conclude):
    """The whole program: runs the plan, then conclude(report). Ends with a line that says what was wrong, if anything."""
    try:
        if min(o.seeds, o.steps, o.jobs) < 1:
            raise Failure("--seeds, --steps and --jobs are at least 1")
        report = {"bench": name, "steps": o.steps, "network": o.network, "runs": {}}
        if os.path.exists(o.json):
            with open(o.json, encoding="utf-8") as file:
                report = json.load(file)
            if report["steps"] != o.steps:
                raise Failure(f"{o.json}: is of {report['steps']} steps, not {o.steps}")
            if not o.draw and report.get("network") != o.network:
                raise Failure(f"{o.json}: is of the network {report.get('network')}, not {o.network}")
        elif o.draw:
            raise Failure(f"{o.json}: there is nothing to draw")
        if not o.draw:
            if o.trainer is None or o.data is None:
                raise Failure("--trainer and --data are needed to run")
            if o.only and not plan.keys() >= set(o.only):
                raise Failure(f"--only: no kind of runs is called {' or '.join(set(o.only) - plan.keys())}; there are: "
                              + ", ".join(plan))
            report["environment"] = {**environment(), "command": spoken(sys.argv)}
            run_all(o, report, plan)
        conclude(report)
        keep(o, report)
    except (Failure, OSError, ValueError, KeyError) as e:
        sys.exit(f"{name}.py: {e!r}" if isinstance(e, KeyError) else f"{name}.py: {e}")
