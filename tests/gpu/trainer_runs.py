"""What the tests of the trainer on GPUs share: how it is run, on threads or processes, and how losses are compared.
sys.argv is that of the tests: [--only EXPRESSION] [--at-once N] TRANSFORMER [MPIRUN OPTIONS...]. --only leaves out checks
whose name, number of ranks and layout, such as "check_files on 2 tp 1 pp 2 ...", the regular expression is not found in;
--at-once runs several side by side: a run spends most of its time on starting.
"""

import argparse
import concurrent.futures
import json
import os
import re
import subprocess
import sys
import tempfile
import threading

parser = argparse.ArgumentParser()
parser.add_argument("--only", default="")
parser.add_argument("--at-once", type=int, default=1)
parser.add_argument("program")
parser.add_argument("mpirun", nargs=argparse.REMAINDER)
ARGUMENTS = parser.parse_args()
PROGRAM, MPIRUN = os.path.abspath(ARGUMENTS.program), ARGUMENTS.mpirun
MODEL = ["--layers", "2", "--heads", "4", "--width", "128", "--context", "64", "--batch", "16"]


def gpus():
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def train(folder, *options, launcher=(), device="cuda", model=MODEL):
    """The report of a run, which writes into the folder."""
    report = os.path.join(folder, "report.json")
    command = [*launcher, PROGRAM, "--device", device, *model, "--quiet", "--report", report, *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if run.returncode != 0:
        sys.exit("%s\nfailed (%d): %s" % (" ".join(command), run.returncode, run.stderr))
    with open(report) as file:
        return json.load(file)


runs_lock, runs = threading.Lock(), {}


def train_once(folder, *options, device="cuda", model=MODEL):
    """The same, of a run that several checks compare theirs with."""
    key = (options, device, tuple(model))
    with runs_lock:
        is_first = key not in runs
        run = runs.setdefault(key, concurrent.futures.Future())
    if is_first:
        try:
            run.set_result(train(folder, *options, device=device, model=model))
        except (SystemExit, subprocess.TimeoutExpired) as failure:
            run.set_exception(failure)
    return run.result()


def processes(count, present):
    """mpirun's command for that many ranks. Where there are fewer GPUs, ranks that have them all are a node for NCCL."""
    command = [*MPIRUN, "-n", str(count)]
    if count > present:
        command += [os.path.join(os.path.dirname(os.path.abspath(__file__)), "virtual_nodes.sh"), str(present)]
    return command


def write_text(folder):
    """A text that can be learned, as a file's name. Of its tenth for validation, windows of 32 leave one token."""
    name = os.path.join(folder, "text.txt")
    with open(name, "wb") as file:
        file.write(bytes(ord("a") + i * i % 23 % 17 for i in range(40020)))
    return name


def write_lengths(folder):
    """Lengths of documents, as a file's name: from one token to more than a sequence has, which are cut to it."""
    name = os.path.join(folder, "lengths.txt")
    with open(name, "w") as file:
        file.write("1 2 3 5 8 13 21 34 55 89 144")
    return name


def losses(report):
    return [loss for _, loss in report["loss"]["curve"]]


def validation(report):
    return [loss for _, loss in report["loss"]["validations"]]


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
        write_lengths(folder)
        os.chdir(folder)  # checks name the file of lengths by its name

        def run(check, on, arguments):
            try:
                check(tempfile.mkdtemp(dir=folder), on, *arguments, *options)
            except (SystemExit, subprocess.TimeoutExpired) as failure:
                print("FAILED: %s" % failure, flush=True)
                failures.append(check.__name__)

        started = []
        with concurrent.futures.ThreadPoolExecutor(ARGUMENTS.at_once) as pool:
            for count in (1, 2, 4):
                on = ranks(count, present)
                if not on.possible:
                    print("left out: %d ranks, there are %d GPUs and no mpirun" % (count, present))
                    continue
                for check, *arguments in alone if count == 1 else together(count):
                    words = (word.lstrip("-") for layout in arguments if isinstance(layout, tuple) for word in layout)
                    if re.search(ARGUMENTS.only, " ".join((check.__name__, "on", str(count), *words))):
                        started.append(pool.submit(run, check, on, arguments))
        if not started:
            sys.exit("--only: no check has '%s' in it" % ARGUMENTS.only)
        for each in started:
            each.result()  # raises what is an error of the test itself
    if failures:
        sys.exit("failed: %s" % ", ".join(failures))
    print("passed on %d GPUs" % min(present, 4))
    return 0
