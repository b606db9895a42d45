#!/usr/bin/env python3
"""What compressing gradients costs in validation loss: uniform levels and those that L-GreCo selects, beside plain ddp.

Trains the bundled transformer at its default sizes over four ranks, once for each seed and each entry of the plan, and
compares means over seeds. A selection is also set beside the uniform levels at its own bytes, interpolated between them
in the logarithm of the bytes. Runs that are in the report already are not repeated.

  bench/compression_quality.py --trainer build/release/examples/transformer/transformer --data tinyshakespeare.txt \\
      --jobs 4 -J quality.json --picture quality.svg

The picture needs matplotlib (pip install matplotlib). With --draw nothing is run.
"""
import argparse
import concurrent.futures
import datetime
import json
import math
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

FAMILIES = {"quantize": ("ddp-4bit", "--bits", "bits"), "topk": ("ddp-topk", "--density", "kept"),
            "powersgd": ("ddp-powersgd", "--rank", "rank")}
UNIFORM = {"quantize": (2, 3, 4, 8), "topk": (0.003, 0.005, 0.01, 0.1), "powersgd": (2, 4, 8, 16)}
SELECTED = {"quantize": (4,), "topk": (0.01,), "powersgd": (8,)}


class Failure(Exception):
    """Its text says what to do."""


def plan_of(o):
    """Name and options of each kind of run."""
    plan = {"ddp": ["--pipeline", "ddp"]}
    for family in o.families:
        pipeline, option, _ = FAMILIES[family]
        for level in UNIFORM[family]:
            plan[f"{family} {level:g}"] = ["--pipeline", pipeline, option, f"{level:g}"]
        for level in SELECTED[family]:
            for policy in o.policies:
                plan[f"{family} from {level:g} {policy}".strip()] = [
                    "--pipeline", "ddp-lgreco", "--family", family, option, f"{level:g}", *policy.split()]
    return plan


def train(o, options, seed):
    """One run of the trainer: its validation loss and what it sent."""
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.json")
        line = [o.trainer, *options, "--ranks", "4", "--steps", str(o.steps), "--eval-every", str(o.steps), "--data",
                o.data, "--seed", str(seed), "--quiet", "--report", report]
        # Ranks are threads, and each calls BLAS.
        done = subprocess.run(line, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"}, capture_output=True, text=True)
        if done.returncode != 0:
            raise Failure(f"{' '.join(line)}: ended with status {done.returncode}: {done.stderr[-2000:]}")
        with open(report, encoding="utf-8") as file:
            r = json.load(file)
    return {"seed": seed, "validation_loss": r["loss"]["validation"], "compression_ratio": r["compression_ratio"],
            "bytes_per_step": r["wire_bytes_per_rank_per_step"], "levels": r.get("levels")}


def run_all(o, report):
    """Fills in the runs that the report lacks, and keeps it after each of them."""
    plan = plan_of(o)
    missing = []
    for name, options in plan.items():
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


def at_bytes(uniform, wanted):
    """The loss of uniform levels at so many bytes, between its neighbors; None outside of them."""
    points = sorted((mean(e, "bytes_per_step"), mean(e, "validation_loss")) for e in uniform)
    for (b0, l0), (b1, l1) in zip(points, points[1:]):
        if b0 <= wanted <= b1:
            return l0 + (l1 - l0) * math.log(wanted / b0) / math.log(b1 / b0)
    return None


def summarize(report):
    """The table that the bars are read from."""
    runs = {name: entry for name, entry in report["runs"].items() if entry["seeds"]}
    plain = mean(runs["ddp"], "validation_loss")
    print(f"\n{'':<40} {'loss':>8} {'of ddp':>8} {'ratio':>8} {'of uniform: loss':>17} {'ratio':>8}"
          f" {'at equal bytes':>15}")
    for name, entry in runs.items():
        loss, ratio = mean(entry, "validation_loss"), mean(entry, "compression_ratio")
        line = f"{name:<40} {loss:>8.4f} {loss / plain:>8.4f} {ratio:>8.2f}"
        if " from " in name:
            family, _, level = name.split()[:3]
            base = runs[f"{family} {level}"]
            others = [e for n, e in runs.items() if n.split()[0] == family and " from " not in n]
            equal = at_bytes(others, mean(entry, "bytes_per_step"))
            entry["of_uniform"] = {"loss": loss / mean(base, "validation_loss"),
                                   "ratio": ratio / mean(base, "compression_ratio"),
                                   "loss_at_equal_bytes": loss / equal if equal else None}
            line += f" {entry['of_uniform']['loss']:>17.4f} {entry['of_uniform']['ratio']:>8.3f}"
            line += f" {loss / equal:>15.4f}" if equal else f" {'-':>15}"
        print(line)


def draw(report, path):
    try:
        import matplotlib
    except ImportError:
        raise Failure("--picture: needs matplotlib (pip install matplotlib)") from None
    matplotlib.use("svg")
    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    from matplotlib import pyplot, ticker
    runs = {name: entry for name, entry in report["runs"].items() if entry["seeds"]}
    families = [f for f in FAMILIES if any(n.startswith(f + " ") for n in runs)]
    plain = runs["ddp"]
    figure, axes = pyplot.subplots(1, len(families), figsize=(4.6 * len(families), 5), squeeze=False)
    for axis, family in zip(axes[0], families):
        axis.axhline(mean(plain, "validation_loss"), color="0.6", linewidth=1, label="ddp, uncompressed")
        uniform = sorted((e for n, e in runs.items() if n.startswith(family + " ") and " from " not in n),
                         key=lambda e: mean(e, "bytes_per_step"))
        selected = [(n, e) for n, e in runs.items() if n.startswith(family + " from ")]
        axis.plot([mean(e, "bytes_per_step") / 1e6 for e in uniform], [mean(e, "validation_loss") for e in uniform],
                  color="tab:blue", marker="o", label="uniform, mean")
        unit = FAMILIES[family][2]
        for entry in uniform:
            level = entry["options"][-1]
            axis.annotate(f"{float(level):.1%}" if family == "topk" else f"{unit} {level}",
                          (mean(entry, "bytes_per_step") / 1e6, mean(entry, "validation_loss")), fontsize=8,
                          textcoords="offset points", xytext=(5, 5))
        for (name, entry), color in zip(selected, ("tab:orange", "tab:green", "tab:red", "tab:purple", "tab:brown")):
            axis.plot([mean(entry, "bytes_per_step") / 1e6], [mean(entry, "validation_loss")], color=color, marker="D",
                      linestyle="none", label=name.removeprefix(family + " ").replace("from", "selected from"))
            axis.scatter([r["bytes_per_step"] / 1e6 for r in entry["seeds"]],
                         [r["validation_loss"] for r in entry["seeds"]], color=color, s=12, alpha=0.5)
        for entry in uniform:
            axis.scatter([r["bytes_per_step"] / 1e6 for r in entry["seeds"]],
                         [r["validation_loss"] for r in entry["seeds"]], color="tab:blue", s=12, alpha=0.5)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        axis.set_xlabel("megabytes a rank and step")
        axis.set_ylabel("validation loss, nats a byte")
        axis.set_title(family)
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    figure.tight_layout()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainer", metavar="PATH", help="examples/transformer's program")
    parser.add_argument("--data", metavar="PATH", help="text to train on")
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--policies", nargs="+", metavar="OPTIONS", default=[""],
                        help="of ddp-lgreco, each a word: '--error-sum squares'; default: its own")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time; each has four threads")
    parser.add_argument("-J", "--json", metavar="PATH", required=True, help="the report: read, added to and written")
    parser.add_argument("--picture", metavar="PATH", help="SVG of loss against bytes")
    parser.add_argument("--draw", action="store_true", help="run nothing")
    o = parser.parse_args()
    try:
        if min(o.seeds, o.steps, o.jobs) < 1:
            raise Failure("--seeds, --steps and --jobs are at least 1")
        report = {"bench": "compression_quality", "steps": o.steps, "runs": {}}
        if os.path.exists(o.json):
            with open(o.json, encoding="utf-8") as file:
                report = json.load(file)
            if report["steps"] != o.steps:
                raise Failure(f"{o.json}: is of {report['steps']} steps, not {o.steps}")
        elif o.draw:
            raise Failure(f"{o.json}: there is nothing to draw")
        if not o.draw:
            if o.trainer is None or o.data is None:
                raise Failure("--trainer and --data are needed to run")
            now = datetime.datetime.now(datetime.timezone.utc)
            report["environment"] = {"date": now.strftime("%Y-%m-%dT%H:%M:%SZ"), "command": " ".join(sys.argv)}
            run_all(o, report)
        summarize(report)
        keep(o, report)
        if o.picture:
            draw(report, o.picture)
    except (Failure, OSError, ValueError, KeyError) as e:
        sys.exit(f"compression_quality.py: {e!r}" if isinstance(e, KeyError) else f"compression_quality.py: {e}")


if __name__ == "__main__":
    main()
