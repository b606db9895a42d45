"""What the tests of the trainer on GPUs share: how it is run, on threads or processes, and how losses are compared.
sys.argv is that of the tests: TRANSFORMER [MPIRUN OPTIONS...].
"""

import json
import os
import subprocess
import sys
import tempfile

PROGRAM, MPIRUN = sys.argv[1], sys.argv[2:]
MODEL = ["--layers", "2", "--heads", "4", "--width", "128", "--context", "64", "--batch", "16"]


def gpus():
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def train(folder, *options, launcher=(), device="cuda", model=MODEL):
    """The report of a run."""
    report = os.path.join(folder, "report.json")
    command = [*launcher, PROGRAM, "--device", device, *model, "--quiet", "--report", report, *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if run.returncode != 0:
        sys.exit("%s\nfailed (%d): %s" % (" ".join(command), run.returncode, run.stderr))
    with open(report) as file:
        return json.load(file)


def processes(count, present):
    """mpirun's command for that many ranks. Ranks that share a GPU must be on hosts of their own for NCCL."""
    command = [*MPIRUN, "-n", str(count)]
    if count > present:
        command += ["sh", "-c", 'NCCL_HOSTID="host $OMPI_COMM_WORLD_RANK" exec "$0" "$@"']
    return command


def write_text(folder):
    """A text that can be learned, as a file's name."""
    name = os.path.join(folder, "text.txt")
    with open(name, "wb") as file:
        file.write(bytes(ord("a") + i * i % 23 % 17 for i in range(40000)))
    return name


def losses(report):
    return [loss for _, loss in report["loss"]["curve"]]


def expect_close(what, got, want, bar):
    worst = max(abs(a - b) / b for a, b in zip(got, want))
    print("%s: losses differ by at most %.2g of their size (bar %.0e)" % (what, worst, bar))
    if len(got) != len(want) or not worst <= bar:
        sys.exit("%s: %s, expected %s" % (what, got, want))


class ranks:
    """How that many are started here; none if they cannot be."""

    def __init__(self, count, present):
        self.count = count
        self.possible = count <= present or bool(MPIRUN)
        self.options = ("--gpus", str(count)) if count <= present else ("--backend", "nccl")
        self.launcher = () if count <= present else processes(count, present)
        self.name = "%d %s" % (count, "GPUs" if count <= present else "processes on %d GPUs" % present)

    def train(self, folder, *options, **how):
        return train(folder, *options, *self.options, launcher=self.launcher, **how)


def expect_same(what, one, other):
    print("%s: parameters %s and %s" % (what, one["parameter_hash"], other["parameter_hash"]))
    if one["parameter_hash"] != other["parameter_hash"]:
        sys.exit("%s: other bits" % what)


def run_checks(alone, together):
    """The exit status of a test: `alone` lists what to call on one GPU, `together(count)` on 2 and on 4 ranks, each a
    function and what it is given behind the folder and the ranks, before the options of the text. Later checks are
    worth their time, whatever one finds.
    """
    present = gpus()
    if present == 0:
        print("skipped: no GPU answers nvidia-smi")
        return 77
    failures = []
    with tempfile.TemporaryDirectory() as folder:
        options = ("--data", write_text(folder))
        for count in (1, 2, 4):
            on = ranks(count, present)
            if not on.possible:
                print("left out: %d ranks, there are %d GPUs and no mpirun" % (count, present))
                continue
            for check, *arguments in alone if count == 1 else together(count):
                try:
                    check(folder, on, *arguments, *options)
                except (SystemExit, subprocess.TimeoutExpired) as failure:
                    print("FAILED: %s" % failure)
                    failures.append(check.__name__)
    if failures:
        sys.exit("failed: %s" % ", ".join(failures))
    print("passed on %d GPUs" % min(present, 4))
    return 0
