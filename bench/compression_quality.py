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
import math

import quality_runs
from quality_runs import mean

FAMILIES = {"quantize": ("ddp-4bit", "--bits", "bits"), "topk": ("ddp-topk", "--density", "kept"),
            "powersgd": ("ddp-powersgd", "--rank", "rank")}
UNIFORM = {"quantize": (2, 3, 4, 8), "topk": (0.003, 0.005, 0.01, 0.1), "powersgd": (2, 4, 8, 16)}
SELECTED = {"quantize": (4,), "topk": (0.01,), "powersgd": (8,)}


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


def at_bytes(uniform, wanted):
    """The loss of uniform levels at so many bytes, between its neighbors; None outside of them."""
    points = sorted((mean(e, "bytes_per_step"), mean(e, "validation_loss")) for e in uniform)
    for (b0, l0), (b1, l1) in zip(points, points[1:]):
        if b0 <= wanted <= b1:
            return l0 + (l1 - l0) * math.log(wanted / b0) / math.log(b1 / b0)
    return None


def summarize(report):
    """The table that the bars are read from."""
    runs = quality_runs.finished(report)
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
    plots = quality_runs.pyplot()
    from matplotlib import ticker
    runs = quality_runs.finished(report)
    families = [f for f in FAMILIES if any(n.startswith(f + " ") for n in runs)]
    plain = runs["ddp"]
    figure, axes = plots.subplots(1, len(families), figsize=(4.6 * len(families), 5), squeeze=False)
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
    quality_runs.add_arguments(parser, steps=2000)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--policies", nargs="+", metavar="OPTIONS", default=[""],
                        help="of ddp-lgreco, each a word: '--error-sum squares'; default: its own")
    parser.add_argument("--picture", metavar="PATH", help="SVG of loss against bytes")
    o = parser.parse_args()

    def conclude(report):
        summarize(report)
        if o.picture:
            draw(report, o.picture)

    quality_runs.main(o, "compression_quality", plan_of(o), conclude)


if __name__ == "__main__":
    main()
