"""trainer_pipelines.py TRANSFORMER [MPIRUN OPTIONS...]: the trainer's pipelines that share state or meet now and then,
on 1, 2 and 4 ranks: ZeRO has the losses of plain data parallelism, on one rank its bits; rounds, and documents whose
attention ranks share, have the losses that they have on CPUs; the same bits twice, and after a checkpoint; weights of
sharded masters survive a file.
Ranks are threads, a GPU each, as far as there are GPUs, and else, with mpirun, processes that share them.
Needs nothing beyond Python's standard library. Exits with 77, and the reason, where no GPU answers.
"""

import os
import sys

from trainer_runs import expect_close, expect_same, losses, ranks, run_checks, train

STAGES = ("zero1", "zero2", "zero3")
# Several messages on 2 and on 4 ranks: they are of 32 MiB times the ranks.
LARGE = ["--layers", "4", "--heads", "16", "--width", "1024", "--context", "64", "--batch", "16",
         "--lr", "1e-4"]


# Sixteen tokens of documents a step: ranks without any.
FEW = ["--layers", "2", "--heads", "4", "--width", "128", "--context", "16", "--batch", "1"]


def check_alone(folder, one, *options):
    """One rank reduces nothing: all stages have the bits of plain data parallelism, and rounds of one step too."""
    for precision in ("float", "bf16"):
        same = (*options, "--steps", "6", "--precision", precision, "--micro-batch", "16")
        plain = one.train(folder, *same, "--pipeline", "ddp")
        for stage in (*STAGES, "local-sgd"):
            expect_same("%s, %s on one GPU" % (stage, precision), one.train(folder, *same, "--pipeline", stage), plain)


def check_stages(folder, on, *options):
    """Sums come in another order: rounding of floats; of gradients of 16 bits (2^-9). On two ranks also the same bits
    twice, and means of several micro-batches that add up."""
    thorough = on.count == 2
    for precision, bar in (("float", 1e-5), ("bf16", 2e-2))[:2 if thorough else 1]:
        same = (*options, "--steps", "6", "--precision", precision)
        plain = on.train(folder, *same, "--pipeline", "ddp", model=LARGE)
        for stage in STAGES:
            once = on.train(folder, *same, "--pipeline", stage, model=LARGE)
            what = "%s, %s on %s" % (stage, precision, on.name)
            expect_close(what, losses(once), losses(plain), bar)
            print("%s: %.0f MiB, %.0f of ddp" %
                  (what, once["peak_bytes_per_rank"] / 2**20, plain["peak_bytes_per_rank"] / 2**20))
            if thorough:
                expect_same(what + ", twice", once, on.train(folder, *same, "--pipeline", stage, model=LARGE))
    if thorough:
        same = (*options, "--steps", "6", "--precision", "float", "--micro-batch", "2")
        plain = on.train(folder, *same, "--pipeline", "ddp", model=LARGE)
        for stage in STAGES[1:]:
            several = on.train(folder, *same, "--pipeline", stage, model=LARGE)
            expect_close("%s, micro-batches of 2 on %s" % (stage, on.name), losses(several), losses(plain), 1e-5)


def check_rounds(folder, on, *options):
    """The CPU's losses, rounding of floats apart."""
    same = (*options, "--steps", "20", "--tau", "4", "--precision", "float")
    pipelines = [("local-sgd",), ("slowmo",), ("co2",), ("diloco",), ("co2", "--sync-steps", "6")]
    if on.count == 4:
        pipelines.append(("co2-zero", "--nodes", "2"))
    for pipeline in pipelines:
        there = on.train(folder, *same, "--pipeline", *pipeline)
        here = train(folder, *same, "--pipeline", *pipeline, "--ranks", str(on.count), device="cpu")
        expect_close("%s on %s" % (" ".join(pipeline), on.name), losses(there), losses(here), 1e-5)
        if there["overlap"]["tau"] != 4 or not there["overlap"]["rounds"]:
            sys.exit("%s: overlap %s" % (pipeline[0], there["overlap"]))
    if on.count == 4:
        half = (*options, "--steps", "20", "--tau", "4", "--pipeline", "co2-zero", "--nodes", "2")
        expect_same("co2-zero, bf16, twice", on.train(folder, *half), on.train(folder, *half))


def check_documents(folder, on, *options):
    """The CPU's losses over documents of all lengths, rounding of floats apart, wherever they are placed: on one rank
    too, and where ranks have no rows. In 16 bits those of one GPU."""
    lengths = os.path.join(folder, "lengths.txt")
    with open(lengths, "w") as file:
        file.write("1 2 3 5 8 13 21 34 55 64 64")
    same = (*options, "--steps", "10", "--lengths", lengths)
    one = ranks(1, 1)
    in_float = train(folder, *same, "--pipeline", "zeppelin", "--ranks", "1", device="cpu")
    in_bf16 = one.train(folder, *same, "--pipeline", "zeppelin", "--precision", "bf16")
    for pipeline in ("packed", "even-ring", "zeppelin"):
        there = (*same, "--pipeline", pipeline, "--precision")
        what = "%s on %s" % (pipeline, on.name)
        once = on.train(folder, *there, "float")
        expect_close(what, losses(once), losses(in_float), 1e-5)
        expect_same(what + ", twice", once, on.train(folder, *there, "float"))
        expect_close(what + ", bf16", losses(on.train(folder, *there, "bf16")), losses(in_bf16), 2e-2)
        measured = once["sequence"]["measured_seconds"]
        if not measured > 0:
            sys.exit("%s: %s seconds in attention" % (what, measured))
    few = (*options, "--steps", "5", "--lengths", lengths, "--pipeline", "packed", "--precision", "float")
    expect_close("few documents on %s" % on.name, losses(on.train(folder, *few, model=FEW)),
                 losses(train(folder, *few, "--ranks", "1", device="cpu", model=FEW)), 1e-5)


def check_checkpoints(folder, on, *options):
    """Stopped between two checkpoints' steps, for co2 in the middle of a round with a mean on its way."""
    for pipeline in (("zero2",), ("zero3",), ("co2", "--tau", "4")):
        same = (*options, "--steps", "12", "--pipeline", *pipeline)
        kept = (*same, "--checkpoint", os.path.join(folder, pipeline[0]), "--checkpoint-every", "3")
        whole = on.train(folder, *same)
        on.train(folder, *kept, "--stop-after", "6")
        rest = on.train(folder, *kept, "--resume")
        expect_same("%s resumed on %s" % (pipeline[0], on.name), rest, whole)
        if losses(rest) != losses(whole)[6:]:
            sys.exit("%s: resumed losses %s, expected %s" % (pipeline[0], losses(rest), losses(whole)[6:]))


def check_files(folder, on, *options):
    """A step too small to change a float: masters that are loaded are saved again, also where ranks share them."""
    of = {1: [("ddp",), ("co2",)], 2: [("zero2",), ("zero3",), ("co2",)], 4: [("co2-zero", "--nodes", "2")]}
    for pipeline in of[on.count]:
        first, second = (os.path.join(folder, name + ".safetensors") for name in ("first", "second"))
        same = (*options, "--precision", "bf16", "--pipeline", *pipeline)
        on.train(folder, *same, "--steps", "3", "--save", first)
        on.train(folder, *same, "--steps", "1", "--lr", "1e-30", "--load", first, "--save", second)
        with open(first, "rb") as a, open(second, "rb") as b:
            if a.read() != b.read():
                sys.exit("%s on %s: weights changed on their way through a file" % (pipeline[0], on.name))
        print("%s on %s: weights through a file" % (pipeline[0], on.name))


def of(count):
    checks = [(check_stages,), (check_rounds,), (check_documents,)]
    return [*checks, *([(check_checkpoints,)] if count == 2 else []), (check_files,)]


if __name__ == "__main__":
    sys.exit(run_checks([(check_alone,), (check_files,), (check_documents,)], of))
