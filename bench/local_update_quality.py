#!/usr/bin/env python3
"""What rounds of local steps cost in validation loss, hidden or awaited, beside plain ddp at equal tokens.

Trains the bundled transformer over four ranks, once for each seed and each entry of the plan, and compares means over
seeds. `--plan small` is the trainer's default: three sequences a replica, where a mean that comes late costs much.
`--plan large` has twelve sequences a replica. Runs that are in the report already are not repeated.

  bench/local_update_quality.py --plan large --trainer build/release/examples/transformer/transformer \\
      --data tinyshakespeare.txt -J quality.json
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
            "local-sgd tau 8": "--pipeline local-sgd --tau 8",
            "slowmo tau 8": "--pipeline slowmo --tau 8 --beta 0.5",
            "slowmo tau 16": "--pipeline slowmo --tau 16 --beta 0.5",
            "co2 tau 8": "--pipeline co2 --tau 8 --beta 0.2",
            "co2 tau 8, no gap": "--pipeline co2 --tau 8 --beta 0.2 --gap none",
            "co2 tau 8, 500 synchronous": "--pipeline co2 --tau 8 --beta 0.2 --sync-steps 500",
        }
    else:
        plan |= {
            "local-sgd tau 8": "--pipeline local-sgd --tau 8",
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
    plain = mean(runs["ddp"], "validation_loss")
    print(f"\n{'':<70} {'loss':>8} {'least':>8} {'most':>8} {'of ddp':>8} {'bytes':>8}")
    for name, entry in runs.items():
        losses = [r["validation_loss"] for r in entry["seeds"]]
        entry["of_ddp"] = mean(entry, "validation_loss") / plain
        sent = mean(entry, "bytes_per_step") / mean(runs["ddp"], "bytes_per_step")
        print(f"{name:<70} {mean(entry, 'validation_loss'):>8.4f} {min(losses):>8.4f} {max(losses):>8.4f}"
              f" {entry['of_ddp']:>8.4f} {sent:>8.3f}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    quality_runs.add_arguments(parser, steps=2000)
    parser.add_argument("--plan", choices=["small", "large"], default="small")
    parser.add_argument("--also", nargs="+", metavar="OPTIONS", default=[],
                        help="more kinds of runs, each a word: '--pipeline co2 --tau 8 --sync-steps 1000'")
    o = parser.parse_args()
    quality_runs.main(o, "local_update_quality", plan_of(o), summarize)


if __name__ == "__main__":
    main()
