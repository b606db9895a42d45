"""trainer_gpus.py TRANSFORMER [MPIRUN OPTIONS...]: the trainer on 1, 2 and 4 GPUs: the same losses at the same global
batch, the same bits twice, weights that survive a file, and traces that say what reports say. Ranks are threads, a GPU
each, as far as there are GPUs; with mpirun they are processes too, which share GPUs where there are fewer, as hosts of
their own for NCCL.
Needs nothing beyond Python's standard library. Exits with 77, and the reason, where no GPU answers.
"""

import json
import os
import sys
import tempfile

from trainer_runs import MPIRUN, expect_close, gpus, losses, processes, train, write_text


def check_trace(folder, report):
    """Each rank's trace: steps one behind the other, in each of them forward, backward and the optimizer in this order,
    and, over all ranks, the waits that the report calls exposed communication."""
    with open(os.path.join(folder, "trace.json")) as file:
        spans = [e for e in json.load(file)["traceEvents"] if e["ph"] == "X"]
    exposed = 0
    for rank in range(report["ranks"]):
        own = sorted(((e["ts"], e["ts"] + e["dur"], e["name"], e["cat"]) for e in spans if e["pid"] == rank))
        steps = [e for e in own if e[3] == "step"]
        if len(steps) != report["steps"]:
            sys.exit("rank %d: %d steps in the trace, %d in the report" % (rank, len(steps), report["steps"]))
        # Marks are on one stream, so their order holds however long the host takes between two of them.
        for before, step in zip(steps, steps[1:]):
            if step[0] < before[1]:
                sys.exit("rank %d: a step begins before the last one ends" % rank)
        for begin, end, _, _ in steps:
            inside = [e for e in own if begin <= e[0] < end]
            order = [e[2] for e in inside if e[2] in ("forward", "backward", "optimizer")]
            if order != ["forward", "backward", "optimizer"]:
                sys.exit("rank %d: a step of %s" % (rank, order))
            exposed += sum(e[1] - e[0] for e in inside if e[3] == "wait")
    told = 1e6 * report["seconds"]["exposed_communication"] * report["ranks"]
    print("exposed communication: %.1f us in the trace, %.1f us in the report" % (exposed, told))
    if abs(exposed - told) > 1 + 1e-3 * told:
        sys.exit("trace and report disagree on the exposed communication")


FAMILIES = (("quantize", "ddp-4bit", ()), ("topk", "ddp-topk", ()), ("powersgd", "ddp-powersgd", ("--rank", "8")))
CHOSEN = ("--pipeline", "ddp-lgreco", "--select-every", "20", "--family")


def check_levels(folder, *options):
    """Levels are functions of gradients, not of time: the same bits twice. They change when they should."""
    for family, _, level in FAMILIES:
        chosen = [train(folder, *options, *CHOSEN, family, *level) for _ in range(2)]
        changes = chosen[0]["levels"]["changes"]
        print("%s: levels %s" % (family, changes[-1][1]))
        if chosen[0]["parameter_hash"] != chosen[1]["parameter_hash"] or chosen[1]["levels"]["changes"] != changes:
            sys.exit("%s: two runs ended with different bits or levels" % family)
        if len(changes) < 2 or any(step not in (1, 22, 42) for step, _ in changes):
            sys.exit("%s: levels changed in steps %s" % (family, [step for step, _ in changes]))


def check_bytes(folder, *options):
    """Chosen levels send no more than one level for all, but for a few kilobytes of tables."""
    for family, uniform, level in FAMILIES:
        chosen = train(folder, *options, *CHOSEN, family, *level)
        same = train(folder, *options, "--pipeline", uniform, *level)
        sent, bar = (report["wire_bytes_per_rank_per_step"] for report in (chosen, same))
        print("%s: %d bytes a step, %d at one level" % (family, sent, bar))
        if sent > bar + 1000:
            sys.exit("%s: chosen levels send more" % family)


def check_nodes(folder, *options):
    """Compressed between nodes alone: the same bits twice, and not those of compressing between all."""
    options += ("--gpus", "4", "--pipeline", "ddp-4bit")
    once, again, flat = (train(folder, *options, "--nodes", str(nodes)) for nodes in (2, 2, 1))
    if once["parameter_hash"] != again["parameter_hash"] or once["parameter_hash"] == flat["parameter_hash"]:
        sys.exit("two nodes: hashes %s, %s, of one node %s" %
                 tuple(report["parameter_hash"] for report in (once, again, flat)))
    expect_close("two nodes of two GPUs", losses(once), losses(flat), 2e-2)


def main():
    present = gpus()
    if present == 0:
        print("skipped: no GPU answers nvidia-smi")
        return 77
    with tempfile.TemporaryDirectory() as folder:
        text = write_text(folder)
        # Sums in another order: rounding of floats; gradients of 16 bits (2^-9) are rounded once more on several GPUs.
        for precision, bar in (("float", 1e-5), ("bf16", 2e-2)):
            options = ["--data", text, "--steps", "20", "--precision", precision]
            one = train(folder, *options, "--gpus", "1")
            check_trace(folder, one)
            if train(folder, *options, "--gpus", "1")["parameter_hash"] != one["parameter_hash"]:
                sys.exit("%s: two runs ended with different bits" % precision)
            for count in (2, 4):
                if count <= present:
                    several = train(folder, *options, "--gpus", str(count))
                    check_trace(folder, several)
                    expect_close("%s on %d GPUs" % (precision, count), losses(several), losses(one), bar)
                if MPIRUN:
                    several = train(folder, *options, "--backend", "nccl", launcher=processes(count, present))
                    check_trace(folder, several)
                    what = "%s in %d processes on %d GPUs" % (precision, count, min(count, present))
                    expect_close(what, losses(several), losses(one), bar)

        check_levels(folder, "--data", text, "--steps", "42")
        if present > 1:
            check_bytes(folder, "--data", text, "--steps", "42", "--gpus", "2")

        if present > 3:
            check_nodes(folder, "--data", text, "--steps", "20")

        # A step too small to change a float: what is loaded is saved again. In 16 bits weights would have been rounded.
        first, second = os.path.join(folder, "first.safetensors"), os.path.join(folder, "second.safetensors")
        train(folder, "--data", text, "--steps", "3", "--save", first)
        train(folder, "--data", text, "--steps", "1", "--lr", "1e-30", "--load", first, "--save", second)
        with open(first, "rb") as a, open(second, "rb") as b:
            if a.read() != b.read():
                sys.exit("weights changed on their way through a file")
    print("passed on %d GPUs" % min(present, 4))
    return 0


if __name__ == "__main__":
    sys.exit(main())
