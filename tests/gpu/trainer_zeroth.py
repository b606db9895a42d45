"""trainer_zeroth.py TRANSFORMER: fine-tuning by forward passes alone on 1 and 2 GPUs: the losses of the CPU's run of
the same seeds; the same bits wherever the weights are, for any number of slots, on any number of GPUs and sliced or
whole; bytes as they should be, and memory that does not grow with the number of layers.
Needs nothing beyond Python's standard library. Exits with 77, and the reason, where no GPU answers.
"""

import os
import sys
import tempfile

from trainer_runs import MODEL, expect_close, gpus, losses, train, write_text


def expect_same(what, got, want):
    figures = ("loss_plus", "loss_minus", "gradient")
    same = (got["parameter_hash"] == want["parameter_hash"] and losses(got) == losses(want) and
            all(got["zeroth"][f] == want["zeroth"][f] for f in figures))
    print("%s: %s" % (what, "the same bits" if same else "OTHER bits"))
    if not same:
        sys.exit("%s: %s, %s; expected %s, %s" % (what, got["parameter_hash"], losses(got), want["parameter_hash"],
                                                  losses(want)))


def main():
    present = gpus()
    if present == 0:
        print("skipped: no GPU answers nvidia-smi")
        return 77
    with tempfile.TemporaryDirectory() as folder:
        text = write_text(folder)
        weights = os.path.join(folder, "first.safetensors")
        train(folder, "--data", text, "--pipeline", "local", "--steps", "50", "--save", weights, device="cpu")
        # Forward arithmetic differs in the last bits of float, directions do not. 16 bits keep 8 or 11 of a loss's factors.
        for precision, bar in (("float", 1e-4), ("bf16", 2e-2), ("float16", 3e-3)):
            options = ["--data", text, "--load", weights, "--steps", "8", "--micro-batch", "4", "--shards", "2",
                       "--directions", "2"]
            on_cpu = train(folder, *options, "--pipeline", "mezo", "--ranks", "1", device="cpu")
            options += ["--precision", precision]
            mezo = train(folder, *options, "--pipeline", "mezo")
            expect_close("%s: mezo on a GPU against the CPU" % precision, losses(mezo), losses(on_cpu), bar)
            runs = [["--pipeline", "zo2", "--slots", str(n)] for n in (1, 2, 3)]
            runs += [["--pipeline", "zo2", "--blocks-resident", "1", "--eval-every", "3"]]
            if present > 1:
                ranks = ["--gpus", "2", "--zo-parallel"]
                runs += [["--pipeline", "distzo2", *ranks, "perturbation", "--sliced"],
                         ["--pipeline", "distzo2", *ranks, "data"]]
                if precision == "float":
                    runs += [["--pipeline", "mezo", *ranks, "data"],
                             ["--pipeline", "distzo2", *ranks, "data", "--sliced", "--slots", "2"]]
            for run in runs:
                report = train(folder, *options, *run)
                expect_same("%s: %s" % (precision, " ".join(run[1:])), report, mezo)
                figures = report["zeroth"]
                print("    bytes up %d, down %d, gathered %d, scalars %d; %.2f MiB on the device, overlap %s" %
                      (figures["upload_bytes"], figures["offload_bytes"], figures["gathered_bytes"],
                       figures["scalar_bytes"], figures["peak_device_bytes"] / 2**20, figures["overlap_efficiency"]))
                if "--sliced" in run and figures["upload_bytes"] != figures["gathered_bytes"]:
                    sys.exit("two ranks: each should upload as much as it gathers")
        # Floats on the host that travel in fewer bits: the losses of those bits, all updates, wherever blocks are.
        few = [*MODEL[:-1], "4"]  # sequences a step
        options = ["--data", text, "--load", weights, "--steps", "8", "--micro-batch", "4"]
        for precision in ("float", "float16"):
            for bits, bar, error in (("16", 3e-3, 3e-4), ("8", 3e-2, 0.03)):
                wire = ["--upload-bits", bits, "--renew-every", "3"]
                want = train(folder, *options, "--pipeline", "zo2", *wire, device="cpu", model=few)
                mine = [*options, "--precision", precision, *wire]
                first = train(folder, *mine, "--pipeline", "zo2", model=few)
                name = "%s, %s bits" % (precision, bits)
                expect_close(name + ": on a GPU against the CPU", losses(first), losses(want), bar)
                share = first["zeroth"]["upload_error"]
                print("%s: an error of %g of the weights, %d bytes up" % (name, share, first["zeroth"]["upload_bytes"]))
                if not 0 < share < error:
                    sys.exit("%s: expected an error below %g" % (name, error))
                runs = [["--pipeline", "zo2", "--slots", "1"]]
                if present > 1:
                    runs += [["--pipeline", "distzo2", "--gpus", "2", "--zo-parallel", "perturbation", *sliced]
                             for sliced in ([], ["--sliced"])]
                for run in runs:
                    expect_same("%s: %s" % (name, " ".join(run[1:])), train(folder, *mine, *run, model=few), first)
        shape = ["--heads", "4", "--width", "128", "--context", "64", "--batch", "16"]
        peaks = [train(folder, "--data", text, "--pipeline", "zo2", "--steps", "3", model=[*shape, "--layers", layers])
                 ["zeroth"]["peak_device_bytes"] for layers in ("4", "8", "16")]
        print("4, 8 and 16 layers: %s bytes on the device" % peaks)
        if len(set(peaks)) != 1:
            sys.exit("memory of the device grows with the number of layers")
    print("passed on %d GPUs" % min(present, 2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
