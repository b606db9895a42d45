"""trainer_zeroth.py TRANSFORMER [MPIRUN OPTIONS...]: fine-tuning by forward passes alone on 1, 2 and 4 ranks: the losses of
the CPU's run of the same seeds; the same bits wherever the weights are, for any number of slots, on any number of ranks,
sliced or whole, and however slices are gathered; bytes as they should be, and memory that does not grow with the number
of layers. Four ranks are processes, two a GPU, where there are two GPUs. Needs nothing beyond Python's standard library.
Exits with 77, and the reason, where no GPU answers.
"""

import os
import sys

from trainer_runs import MODEL, expect_close, losses, run_checks, train

FEW = [*MODEL[:-1], "4"]  # sequences a step
BITS = {}  # reports that others are compared with


def expect_same(what, got, want):
    figures = ("loss_plus", "loss_minus", "gradient")
    same = (got["parameter_hash"] == want["parameter_hash"] and losses(got) == losses(want) and
            all(got["zeroth"][f] == want["zeroth"][f] for f in figures))
    print("%s: %s" % (what, "the same bits" if same else "OTHER bits"))
    if not same:
        sys.exit("%s: %s, %s; expected %s, %s" % (what, got["parameter_hash"], losses(got), want["parameter_hash"],
                                                  losses(want)))


def trained(folder, *options):
    """Options to go on from weights that a model has learned, as the options of the text say."""
    weights = os.path.join(folder, "first.safetensors")
    if not os.path.exists(weights):
        train(folder, *options, "--pipeline", "local", "--steps", "50", "--save", weights, device="cpu")
    return [*options, "--load", weights, "--steps", "8", "--micro-batch", "4"]


def mezo_of(folder, precision, shards, *options):
    """mezo's report of a run on one GPU, and the options of that run."""
    how = [*trained(folder, *options), "--shards", shards, "--directions", "2", "--precision", precision]
    if (precision, shards) not in BITS:
        BITS[precision, shards] = train(folder, *how, "--pipeline", "mezo")
    return BITS[precision, shards], how


def has_the_cpus_losses(folder, _, precision, bar, *options):
    mezo, how = mezo_of(folder, precision, "2", *options)
    on_cpu = train(folder, *how[:-2], "--pipeline", "mezo", "--ranks", "1", device="cpu")
    expect_close("%s: mezo on a GPU against the CPU" % precision, losses(mezo), losses(on_cpu), bar)


def has_mezos_bits(folder, on, precision, shards, run, *options):
    mezo, how = mezo_of(folder, precision, shards, *options)
    report = on.train(folder, *how, "--pipeline", *run)
    expect_same("%s, %s: %s" % (on.name, precision, " ".join(run)), report, mezo)
    figures = report["zeroth"]
    print("    bytes up %d, down %d, gathered %d, scalars %d; %.2f MiB on the device, overlap %s; gathers %s %s" %
          (figures["upload_bytes"], figures["offload_bytes"], figures["gathered_bytes"], figures["scalar_bytes"],
           figures["peak_device_bytes"] / 2**20, figures["overlap_efficiency"], figures["gather"],
           figures["gather_seconds"]))
    if "--sliced" in run and figures["gathered_bytes"] != (on.count - 1) * figures["upload_bytes"]:
        sys.exit("each rank should gather what the others upload")
    if "--gather" in run and (figures["gather"] != run[-1] or figures["gather_seconds"] is not None):
        sys.exit("the way to gather is not the one that was asked for")
    if "--sliced" in run and "--gather" not in run:
        threads = not on.launcher
        if figures["gather"] != min(figures["gather_seconds"], key=figures["gather_seconds"].get):
            sys.exit("the way to gather is not the fastest")
        if ("copies" in figures["gather_seconds"]) != threads:
            sys.exit("ranks copy from each other if, and only if, they are threads of one process")


def has_few_bits(folder, on, precision, bits, bar, error, *options):
    """Floats on the host that travel in fewer bits: the losses of those bits, all updates, wherever blocks are."""
    how = [*trained(folder, *options), "--upload-bits", bits, "--renew-every", "3"]
    name = "%s, %s bits" % (precision, bits)
    mine = [*how, "--precision", precision]
    if name not in BITS:
        BITS[name] = train(folder, *mine, "--pipeline", "zo2", model=FEW)
    first = BITS[name]
    if on.count == 1:
        want = train(folder, *how, "--pipeline", "zo2", device="cpu", model=FEW)
        expect_close(name + ": on a GPU against the CPU", losses(first), losses(want), bar)
        share = first["zeroth"]["upload_error"]
        print("%s: an error of %g of the weights, %d bytes up" % (name, share, first["zeroth"]["upload_bytes"]))
        if not 0 < share < error:
            sys.exit("%s: expected an error below %g" % (name, error))
        runs = [["zo2", "--slots", "1"]]
    else:
        runs = [["distzo2", "--zo-parallel", "perturbation", *sliced] for sliced in ([], ["--sliced"])]
    for run in runs:
        expect_same("%s: %s" % (name, " ".join(run)), on.train(folder, *mine, "--pipeline", *run, model=FEW), first)


def has_the_memory_of_any_depth(folder, on, *options):
    shape = ["--heads", "4", "--width", "128", "--context", "64", "--batch", "16"]
    peaks = [on.train(folder, *options, "--pipeline", "zo2", "--steps", "3", model=[*shape, "--layers", layers])
             ["zeroth"]["peak_device_bytes"] for layers in ("4", "8", "16")]
    print("4, 8 and 16 layers: %s bytes on the device" % peaks)
    if len(set(peaks)) != 1:
        sys.exit("memory of the device grows with the number of layers")


PRECISIONS = {"float": 1e-4, "bf16": 2e-2, "float16": 3e-3}
LOW_BITS = [(precision, *figures) for precision in ("float", "float16")
            for figures in (("16", 3e-3, 3e-4), ("8", 3e-2, 0.03))]


def alone():
    # Forward arithmetic differs in the last bits of float, directions do not. 16 bits keep 8 or 11 of a loss's factors.
    checks = [(has_the_cpus_losses, precision, bar) for precision, bar in PRECISIONS.items()]
    for precision in PRECISIONS:
        checks += [(has_mezos_bits, precision, "2", ["zo2", "--slots", str(n)]) for n in (1, 2, 3)]
        checks += [(has_mezos_bits, precision, "2", ["zo2", "--blocks-resident", "1", "--eval-every", "3"])]
    checks += [(has_few_bits, *figures) for figures in LOW_BITS]
    return [*checks, (has_the_memory_of_any_depth,)]


def together(count):
    pairs, data = ["--zo-parallel", "perturbation" if count == 2 else "2d"], ["--zo-parallel", "data"]
    shards = str(count)
    checks = [(has_mezos_bits, "float", shards, ["mezo", *data]),
              (has_mezos_bits, "float", shards, ["distzo2", *data, "--sliced", "--slots", "2"])]
    for precision in PRECISIONS if count == 2 else ("float", "bf16"):
        checks += [(has_mezos_bits, precision, "2", ["distzo2", *pairs, "--sliced"]),
                   (has_mezos_bits, precision, shards, ["distzo2", *data])]
    if count == 2:
        checks += [(has_mezos_bits, "float", "2", ["distzo2", *pairs, "--sliced", "--gather", way])
                   for way in ("collective", "messages", "copies")]
        checks += [(has_few_bits, *figures) for figures in LOW_BITS]
    else:
        checks += [(has_mezos_bits, "float", "2", ["distzo2", *pairs, "--sliced", "--gather", "messages"])]
    return checks


if __name__ == "__main__":
    sys.exit(run_checks(alone(), together))
