#!/usr/bin/env python3
"""What rounds of local steps cost in validation loss, hidden or awaited, beside plain ddp at equal tokens.

Trains the bundled transformer over four ranks, once for each seed and each entry of the plan, and compares means over
seeds. `--plan small` is the trainer's default: three sequences a replica, where a mean that comes late costs much.
`--plan large` has twelve sequences a replica. Runs that are in the report already are not repeated.

  bench/local_update_quality.py --plan large --trainer build/release/examples/transformer/transformer \\
      --data tinyshakespeare.txt -J quality.json

With --network and --eval-every, --picture draws the validation losses against tokens and against the time in steps
(needs matplotlib: pip install matplotlib). With --draw nothing is run.
"""
import argparse

import quality_runs
from quality_runs import mean


def plan_of(o):
    """Name and options of each kind of run."""
    batch = {"small": 12, "large": 48}[o.plan]
    plan = {"ddp": "--pipeline ddp"}
    if o.plan == "small":
        plan |= {
            "slowmo tau 8": "--pipeline slowmo --tau 8 --beta 0.5",
            "slowmo tau 16": "--pipeline slowmo --tau 16 --beta 0.5",
            "co2 tau 8": "--pipeline co2 --tau 8 --beta 0.2",
            "cocod tau 8": "--pipeline cocod --tau 8",
            "co2 tau 8, 1500 synchronous, gap 4":
                "--pipeline co2 --tau 8 --beta 0.5 --gap constant:4 --sync-steps 1500",
        }
    else:
        plan |= {
            "slowmo tau 8": "--pipeline slowmo --tau 8 --beta 0.5",
            "slowmo tau 8, 1500 synchronous": "--pipeline slowmo --tau 8 --beta 0.5 --sync-steps 1500",
            "co2 tau 8": "--pipeline co2 --tau 8 --beta 0.2",
            "co2 tau 8, 1500 synchronous, gap 4":
                "--pipeline co2 --tau 8 --beta 0.5 --gap constant:4 --sync-steps 1500",
        }
    plan |= {options: options for options in o.also}
    return {name: [*options.split(), "--batch", str(batch)] for name, options in plan.items()}


def summarize(report):
    """The table that the bars are read from."""
    runs = quality_runs.finished(report)
    if "ddp" not in runs:
        return
    plain = mean(runs["ddp"], "validation_loss")
    print(f"\n{'':<70} {'loss':>8} {'least':>8} {'most':>8} {'of ddp':>8} {'bytes':>8}")
    for name, entry in runs.items():
        losses = [r["validation_loss"] for r in entry["seeds"]]
        entry["of_ddp"] = mean(entry, "validation_loss") / plain
        sent = mean(entry, "bytes_per_step") / mean(runs["ddp"], "bytes_per_step")
        print(f"{name:<70} {mean(entry, 'validation_loss'):>8.4f} {min(losses):>8.4f} {max(losses):>8.4f}"
              f" {entry['of_ddp']:>8.4f} {sent:>8.3f}")


def draw(report, path):
    """Each kind's first seed: loss against tokens, and against the time in steps."""
    plots = quality_runs.pyplot()
    figure, axes = plots.subplots(1, 2, figsize=(13, 5.4), sharey=True)
    for name, entry in quality_runs.finished(report).items():
        points = entry["seeds"][0].get("validations", [])
        for axis, unit, scale in zip(axes, ("tokens", "seconds"), (1e6, 1)):
            axis.plot([p[unit] / scale for p in points], [p["loss"] for p in points], marker="o", markersize=3,
                      label=f"{name} ({entry['seeds'][0]['validation_loss']:.3f})")
    axes[0].set_xlabel("million tokens")
    axes[0].set_ylabel("validation loss, nats a byte")
    axes[1].set_xlabel(f"seconds in training steps, network of {report['network'] or 'this machine'}")
    axes[1].legend(fontsize=8)
    for axis in axes:
        axis.set_ylim(top=2.6)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    quality_runs.add_arguments(parser, steps=2000)
    parser.add_argument("--plan", choices=["small", "large"], default="small")
    parser.add_argument("--also", nargs="+", metavar="OPTIONS", default=[],
                        help="more kinds of runs, each a word: '--pipeline co2 --tau 8 --sync-steps 1000'")
    parser.add_argument("--picture", metavar="PATH", help="SVG of loss against tokens and against time")
    o = parser.parse_args()

    def conclude(report):
        summarize(report)
        if o.picture:
            draw(report, o.picture)

    quality_runs.main(o, "local_update_quality", plan_of(o), conclude)


if __name__ == "__main__":
    main()
