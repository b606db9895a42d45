#!/usr/bin/env python3
"""Pictures of what bench/sequence_gpus.py, or bench_sequence_attention by itself, has measured: milliseconds of attention
by batch, as bars.

  bench/sequence_picture.py result.json --out bench/results

writes an SVG for each setting and kind of kernels in the report, named after the report. Needs Python's standard library
alone. Where the longest bar is more than twenty times the shortest the axis is logarithmic.
"""
import argparse
import json
import math
import os
import re
import sys
from xml.sax.saxutils import escape

COLORS = {"ideal": "#9e9e9e", "zeppelin": "#2e7d32", "even-ring": "#ef6c00", "PyTorch": "#6a1b9a"}
LABEL, PLOT, BAR, GAP, TOP = 170, 520, 15, 14, 62


def groups_of(table, kernels):
    """Batch -> [(what, milliseconds, times the ideal)], in the order of the report."""
    groups = {}
    for row in table["tutti"]["rows"]:
        if row["kernels"] != kernels:
            continue
        bars = groups.setdefault(row["batch"], {})
        if row["ideal_ms"]:
            bars["ideal"] = (row["ideal_ms"], None)
        bars[row["plan"]] = (row["ms"]["p50"], row["of_ideal_time"])
    for row in table.get("PyTorch", {}).get("rows", []):
        if row["batch"] in groups:
            groups[row["batch"]]["PyTorch"] = (row["ms"]["p50"], row["of_ideal_time"])
    return {batch: [(what, *bars[what]) for what in COLORS if what in bars] for batch, bars in groups.items()}


def ticks_of(least, most, logarithmic):
    """Positions of lines, and where a length is, as a share of the axis."""
    if logarithmic:
        low, high = math.log10(least / 3), math.log10(most * 1.15)
        decades = range(math.ceil(low), math.floor(high) + 1)
        return [10.0**e for e in decades], lambda ms: (math.log10(ms) - low) / (high - low)
    step = 10.0**math.floor(math.log10(most / 2))
    step *= next(m for m in (1, 2, 5, 10) if most / (m * step) <= 8)
    end = most * 1.05
    return [step * i for i in range(math.floor(end / step) + 1)], lambda ms: ms / end


def svg_of(title, groups):
    lengths = [ms for bars in groups.values() for _, ms, _ in bars]
    logarithmic = max(lengths) > 20 * min(lengths)
    ticks, share = ticks_of(min(lengths), max(lengths), logarithmic)
    rows = sum(len(bars) for bars in groups.values())
    height = TOP + rows * BAR + len(groups) * GAP + 34
    width = LABEL + PLOT + 110
    bottom = height - 34
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
           'font-family="sans-serif" font-size="11">', f'<rect width="{width}" height="{height}" fill="white"/>',
           f'<text x="12" y="20" font-size="14">{escape(title)}</text>']
    for i, (what, color) in enumerate(COLORS.items()):
        if any(what == name for bars in groups.values() for name, _, _ in bars):
            out.append(f'<rect x="{LABEL + 110 * i}" y="32" width="11" height="11" fill="{color}"/>'
                       f'<text x="{LABEL + 110 * i + 16}" y="42">{what}</text>')
    for tick in ticks:
        x = LABEL + PLOT * share(tick)
        out.append(f'<line x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="#dddddd"/>'
                   f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{tick:g}</text>')
    axis = "milliseconds, forward and backward" + (", logarithmic" if logarithmic else "")
    out.append(f'<text x="{LABEL + PLOT / 2:.1f}" y="{bottom + 29}" text-anchor="middle">{axis}</text>')
    y = TOP
    for batch, bars in groups.items():
        out.append(f'<text x="{LABEL - 8}" y="{y + len(bars) * BAR / 2 + 4:.1f}" text-anchor="end">{escape(batch)}</text>')
        for what, ms, of_ideal in bars:
            length = PLOT * share(ms)
            text = f"{ms:.1f}" + (f" ({of_ideal:.2f})" if of_ideal else "")
            out.append(f'<rect x="{LABEL}" y="{y}" width="{length:.1f}" height="{BAR - 2}" fill="{COLORS[what]}"/>'
                       f'<text x="{LABEL + length + 5:.1f}" y="{y + BAR - 4}">{text}</text>')
            y += BAR
        y += GAP
    return "\n".join(out + ["</svg>", ""])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", help="of sequence_gpus.py or bench_sequence_attention")
    parser.add_argument("--out", metavar="FOLDER", default=".", help="where pictures are written")
    o = parser.parse_args()
    try:
        with open(o.report, encoding="utf-8") as file:
            report = json.load(file)
        if report.get("bench") not in ("sequence_gpus", "sequence_attention"):
            raise ValueError(f"{o.report} is no report of sequence_gpus.py or bench_sequence_attention")
        name = os.path.splitext(os.path.basename(o.report))[0]
        for setting, table in report.get("tables", {"together": {"tutti": report}}).items():
            for kernels in dict.fromkeys(row["kernels"] for row in table["tutti"]["rows"]):
                groups = groups_of(table, kernels)
                title = (f"Attention, {report['gpus']} x {report['device'].split(',')[0]}, {setting}, {kernels} kernels; "
                         "in brackets times the ideal")
                path = os.path.join(o.out, re.sub(r"[^a-z0-9]+", "_", f"{name} {setting} {kernels}".lower()) + ".svg")
                with open(path, "w", encoding="utf-8") as file:
                    file.write(svg_of(title, groups))
                print(path)
    except (OSError, ValueError, KeyError) as e:
        sys.exit(f"sequence_picture.py: {e!r}" if isinstance(e, KeyError) else f"sequence_picture.py: {e}")


if __name__ == "__main__":
    main()
