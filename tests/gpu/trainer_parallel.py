"""trainer_parallel.py TRANSFORMER [MPIRUN OPTIONS...]: ranks that have parts of the model, of sequences and of documents,
on 2 and 4 GPUs: the losses of one GPU and of the CPU, the CPU's bytes along each dimension, the same bits twice and
after a checkpoint, weights that survive a file, what is not held where ranks share it, and what is said where memory ends.
Ranks are threads, a GPU each, as far as there are GPUs, and else, with mpirun, processes that share them.
Needs nothing beyond Python's standard library. Exits with 77, and the reason, where no GPU answers.
"""

import os
import re
import shutil
import subprocess
import sys

from trainer_runs import PROGRAM, expect_close, expect_same, losses, run_checks, train, train_once, validation

SIZES = ["--heads", "4", "--width", "64", "--context", "32", "--batch", "16", "--micro-batch", "2"]
SMALL = ["--layers", "8", *SIZES]
# Of one bucket, also on the CPU, whose buckets are smaller: how often stages 2 and 3 send depends on their number.
SMALLER = ["--layers", "4", *SIZES]
# Heads of 64 in 16 bits: cuDNN's attention, and products with what follows them.
WIDE = ["--layers", "4", "--heads", "8", "--width", "512", "--context", "128", "--batch", "16", "--micro-batch", "4",
        "--lr", "1e-4"]


def cut(tp=1, pp=1, dp=1, sp=1, schedule="1f1b", zero=0, rows=False, documents=False):
    return ("--pipeline", "3d", "--tp", str(tp), "--pp", str(pp), "--dp", str(dp), "--sp", str(sp),
            "--pipeline-schedule", schedule, "--zero", str(zero), *(["--sequence-parallel"] if rows else []),
            *(["--lengths", "lengths.txt"] if documents else []))


def of_two():
    """Layouts of two ranks, and whether they are run twice, and in 16 bits."""
    yield cut(tp=2), True
    yield cut(tp=2, rows=True), True
    for schedule in ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe"):
        yield cut(pp=2, schedule=schedule), schedule in ("1f1b", "dualpipe")
    yield cut(dp=2, zero=0), False
    yield cut(dp=2, zero=1), True
    yield cut(sp=2, zero=1), True
    yield cut(dp=2, zero=2), True
    yield cut(dp=2, zero=3), True
    yield cut(sp=2, zero=3), False
    yield cut(sp=2, documents=True), True
    yield cut(sp=2, zero=2, documents=True), False
    yield cut(tp=2, documents=True), False
    yield cut(pp=2, schedule="zb-v", documents=True), True


def of_four():
    yield cut(tp=2, pp=2), True
    yield cut(tp=4), False
    yield cut(tp=4, rows=True), False
    yield cut(tp=2, pp=2, schedule="zb-v", rows=True), True
    yield cut(pp=4), False
    yield cut(tp=2, dp=2, zero=1), True
    yield cut(tp=2, dp=2, zero=2), True
    yield cut(tp=2, dp=2, zero=3), True
    yield cut(tp=2, dp=2, zero=2, rows=True), False
    yield cut(tp=2, dp=2, zero=3, rows=True), True
    yield cut(tp=2, sp=2, zero=3), False
    yield cut(tp=2, sp=2, zero=3, documents=True), True
    yield cut(tp=2, pp=2, schedule="zb-v"), False
    yield cut(pp=2, dp=2, schedule="dualpipe", zero=1), False
    yield cut(tp=2, sp=2), False
    yield cut(tp=2, sp=2, zero=1, documents=True), True
    yield cut(pp=2, sp=2, schedule="zb-h1"), False
    yield cut(pp=2, sp=2, documents=True), True
    yield cut(dp=2, sp=2, zero=1), False
    yield cut(dp=2, sp=2, documents=True), False
    yield cut(sp=4, documents=True), False


def name_of(layout, on):
    return "%s on %s" % (" ".join(word.lstrip("-") for word in layout[2:]), on.name)


def undivided(layout):
    """The same sequences on one rank."""
    return cut(documents="--lengths" in layout)


def check_in_float(folder, on, layout, twice, *options):
    """Sums come in another order: rounding of floats."""
    same = (*options, "--steps", "6", "--precision", "float")
    model = SMALLER if layout[layout.index("--zero") + 1] in "23" else SMALL
    one = train_once(folder, *same, *undivided(layout), model=model)
    here = train_once(folder, *same, *undivided(layout), "--recompute", "0", device="cpu", model=model)
    expect_close("one GPU beside the CPU", losses(one), losses(here), 1e-5)
    what = name_of(layout, on)
    there = on.train(folder, *same, *layout, model=model)
    for name, other in (("one GPU", one), ("the CPU", here)):
        expect_close("%s beside %s" % (what, name), losses(there), losses(other), 1e-5)
        expect_close("%s beside %s, validation" % (what, name), validation(there), validation(other), 1e-5)
    cpu = train(folder, *same, *layout, "--recompute", "0", device="cpu", model=model)
    sent, expected = (report["parallel"]["bytes_per_rank_per_step"] for report in (there, cpu))
    print("%s: bytes a step %s" % (what, sent))
    if sent != expected or there["parallel"]["bubble_fraction"] != cpu["parallel"]["bubble_fraction"]:
        sys.exit("%s: bytes a step %s, bubble %s; on the CPU %s, %s" %
                 (what, sent, there["parallel"]["bubble_fraction"], expected, cpu["parallel"]["bubble_fraction"]))
    if twice:
        expect_same(what + ", twice", there, on.train(folder, *same, *layout, model=model))


def check_in_16_bits(folder, on, layout, *options):
    """Gradients and activations of 2^-9 are rounded once more for each sum over ranks."""
    same = (*options, "--steps", "6", "--precision", "bf16")
    one = train_once(folder, *same, *undivided(layout), model=WIDE)
    what = name_of(layout, on) + ", bf16"
    there = on.train(folder, *same, *layout, model=WIDE)
    expect_close(what, losses(there), losses(one), 2e-2)
    expect_same(what + ", twice", there, on.train(folder, *same, *layout, model=WIDE))


def check_unlike_heads(folder, on, *options):
    """Heads that do not divide: some ranks have one more."""
    heads = on.count + 1
    for precision, width, bar in (("float", 16, 1e-5), ("bf16", 64, 2e-2)):
        model = ["--layers", "2", "--heads", str(heads), "--width", str(width * heads), "--context", "64", "--batch",
                 "8", "--lr", "1e-4"]
        same = (*options, "--steps", "4", "--precision", precision)
        one = train(folder, *same, *cut(), model=model)
        for rows in (False, True):
            there = on.train(folder, *same, *cut(tp=on.count, rows=rows), model=model)
            expect_close("%d heads on %s, %s" % (heads, on.name, precision), losses(there), losses(one), bar)


def check_files(folder, on, layout, *options):
    """A step too small to change a float: masters that are loaded are saved again, by one GPU too."""
    first, second, third = (os.path.join(folder, name + ".safetensors") for name in ("first", "second", "third"))
    same = (*options, "--precision", "bf16")
    on.train(folder, *same, *layout, "--steps", "3", "--save", first, model=SMALL)
    still = (*same, "--steps", "1", "--lr", "1e-30")
    on.train(folder, *still, *layout, "--load", first, "--save", second, model=SMALL)
    train(folder, *still, *cut(), "--load", second, "--save", third, model=SMALL)
    files = []
    for name in (first, second, third):
        with open(name, "rb") as file:
            files.append(file.read())
    if files[1] != files[0] or files[2] != files[0]:
        sys.exit("%s: weights changed on their way through a file" % name_of(layout, on))
    print("%s: weights through files" % name_of(layout, on))


def check_checkpoints(folder, on, layout, *options):
    """Stopped half way and resumed: the losses and bits of a run that was not."""
    same = (*options, *layout, "--steps", "6", "--precision", "bf16")
    kept = (*same, "--checkpoint", os.path.join(folder, "kept"), "--checkpoint-every", "3")
    whole = on.train(folder, *same, model=SMALL)
    on.train(folder, *kept, "--stop-after", "3", model=SMALL)
    rest = on.train(folder, *kept, "--resume", model=SMALL)
    shutil.rmtree(os.path.join(folder, "kept"))
    expect_same(name_of(layout, on) + ", resumed", rest, whole)
    if losses(rest) != losses(whole)[3:]:
        sys.exit("%s: resumed losses %s, expected %s" % (name_of(layout, on), losses(rest), losses(whole)[3:]))


def check_memory(folder, on, *options):
    """Of P parameters in 16 bits, stage 2 holds 2 P bytes of gradients less, stage 3 another P of values: it keeps its
    half of them, as the other two keep what was reduced; each but for some buckets at work, of 32 MiB a rank at most."""
    layers, width = 24, 1536
    model = ["--layers", str(layers), "--heads", "12", "--width", str(width), "--context", "64", "--batch",
             str(2 * on.count), "--micro-batch", "1", "--lr", "1e-4"]
    tp, dp = on.count // 2, 2
    one, two, three = (on.train(folder, *options, *cut(tp=tp, dp=dp, zero=zero), "--steps", "2", "--precision", "bf16",
                                model=model)["peak_bytes_per_rank"] for zero in (1, 2, 3))
    parameters, bucket = layers * 12 * width ** 2 // tp, 2 * 32 * 2 ** 20
    print("tp %d x dp 2 on %s: %d bytes at the peak of zero 1, %d of 2, %d of 3" % (tp, on.name, one, two, three))
    for less, shared in ((one - two, 2 * parameters), (two - three, parameters)):
        if not shared - 4 * bucket < less < shared:
            sys.exit("%d bytes less, %d are shared" % (less, shared))


def check_no_room(folder, on, *options):
    """More weights than any GPU holds: all ranks end at once, with what there is and what to do in one line."""
    if on.launcher:
        return
    command = [PROGRAM, "--device", "cuda", "--gpus", str(on.count), *cut(dp=on.count), *options, "--layers", "96", "--heads",
               "64", "--width", "8192", "--context", "64", "--batch", str(2 * on.count), "--micro-batch", "2", "--quiet",
               "--report", os.path.join(folder, "none", "report.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    print("%s: %s" % (on.name, done.stderr.strip()))
    told = re.fullmatch(r"transformer: [^\n]* has no room for [0-9.e+]+ GiB: [0-9.e+]+ GiB are held here, [0-9.]+ of [0-9.]+ "
                        r"GiB are free [^\n]*; less is needed with --micro-batch below 2, [^\n]*\n", done.stderr)
    if done.returncode != 1 or not told:
        sys.exit("%s: %s\nended with %d: %s" % (on.name, " ".join(command), done.returncode, done.stderr))


def of(count):
    layouts = list(of_two() if count == 2 else of_four())
    layout = cut(pp=2, schedule="zb-v") if count == 2 else cut(tp=2, dp=2, zero=1)
    of_sequences = cut(sp=2) if count == 2 else cut(pp=2, sp=2, zero=1, documents=True)
    sharing = cut(sp=2, zero=3) if count == 2 else cut(tp=2, dp=2, zero=3, rows=True)
    return [*((check_in_float, *of_layout) for of_layout in layouts),
            *((check_in_16_bits, which) for which, twice in layouts if twice), (check_unlike_heads,),
            *((check, which) for check in (check_files, check_checkpoints) for which in (layout, of_sequences, sharing)),
            (check_memory,),
            (check_no_room,)]


if __name__ == "__main__":
    sys.exit(run_checks([], of))
