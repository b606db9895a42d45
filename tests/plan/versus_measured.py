#!/usr/bin/env python3
"""versus_measured.py SOURCE_FOLDER PLAN_A_JOB: bench/plan_versus_measured.py with a stand-in for the trainer, whose steps
take what the planner says of a known machine: which points calibrate, errors, order, memory, what fails and is tried again.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree as xml

SOURCES, PLANNER = pathlib.Path(sys.argv[1]), sys.argv[2]
sys.path.insert(0, str(SOURCES / "bench"))
import plan_versus_measured as bench  # noqa: E402

# Its steps are those in truth.json, by name; the first of them is slow. It writes down that it was run.
TRAINER = f'''#!{sys.executable}
import json, os, sys, time
sys.path.insert(0, {str(SOURCES / "bench")!r})
folder = os.path.dirname(os.path.abspath(__file__))
option = dict(zip(sys.argv[1:], sys.argv[2:]))
with open(os.path.join(folder, "truth.json"), encoding="utf-8") as file:
    truth = json.load(file)
key = " ".join(["zero" + option["--zero"], *(option[name] for name in (
    "--tp", "--pp", "--gpus", "--batch", "--micro-batch", "--recompute")), option.get("--pipeline-schedule", "1f1b")])
with open(os.path.join(folder, "runs.txt"), "a", encoding="utf-8") as file:
    file.write(key + "\\n")
answer = truth[key]
if answer == "slow":
    time.sleep(60)
if isinstance(answer, str):
    sys.exit("transformer: " + answer)
seconds, gib = answer
with open(option["--report"], "w", encoding="utf-8") as file:
    json.dump({{"seconds": {{"steps": [9 * seconds] + [seconds * x for x in (0.9, 1, 1, 1.3)]}},
               "peak_bytes_per_rank": gib * 2**30}}, file)
'''


def key_of(p):
    return " ".join(map(str, (f"zero{p['zero_stage']}", p["tp"], p["pp"], bench.gpus_of(p),
                              p["dp"] * p["micro_batches"] * p["micro_batch"], p["micro_batch"],
                              3 if p["recompute"] == "stages" else 0, bench.SCHEDULES[p["schedule"]])))


class Folder:
    """A stand-in whose truth is what the planner says of H200s, and the program under test."""

    def __init__(self, test, points):
        temporary = tempfile.TemporaryDirectory()
        test.addCleanup(temporary.cleanup)
        self.path = pathlib.Path(temporary.name)
        self.points = points
        trainer = self.path / "trainer"
        trainer.write_text(TRAINER, encoding="utf-8")
        trainer.chmod(0o755)

        class Options:
            model = "gpt2-1558m"
        self.write("jobs.json", {"steps": [bench.as_job(Options, p) for p in points]})
        subprocess.run([PLANNER, "--machine", "hgx-h200", "--predict", self.path / "jobs.json", "--report",
                        self.path / "times.json"], check=True, capture_output=True)
        self.truth = {key_of(p): [s["seconds_per_step"], s["memory_gib_per_gpu"]]
                      for p, s in zip(points, self.read("times.json")["steps"])}
        self.write("points.json", points)

    def write(self, name, content):
        (self.path / name).write_text(json.dumps(content), encoding="utf-8")

    def read(self, name):
        return json.loads((self.path / name).read_text(encoding="utf-8"))

    def runs(self):
        file = self.path / "runs.txt"
        return file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []

    def run(self, *options, code=0):
        self.write("truth.json", self.truth)
        done = subprocess.run([sys.executable, SOURCES / "bench/plan_versus_measured.py", "--planner", PLANNER, "--tutti",
                               self.path / "trainer", "--points", self.path / "points.json", "-J",
                               self.path / "report.json", *options], capture_output=True, text=True)
        if done.returncode != code:
            raise AssertionError(f"ended with {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout + done.stderr


def ten():
    p = bench.point
    return [p(1, 1, 1, 8, 4), p(1, 1, 2, 4, 4, zero_stage=1), p(1, 1, 2, 4, 4, zero_stage=2),
            p(1, 1, 2, 2, 8, zero_stage=3), p(2, 1, 1, 4, 8), p(1, 2, 1, 8, 4), p(1, 2, 1, 16, 2, schedule="zero_bubble"),
            p(1, 2, 1, 8, 4, schedule="interleaved"), p(1, 2, 1, 8, 4, recompute="stages"), p(1, 1, 1, 1, 32)]


class Choice(unittest.TestCase):
    def test_the_choice_is_made_before_anything_is_run(self):
        points = bench.POINTS[2]
        chosen = bench.calibrating(points, 0.7, 1)
        self.assertEqual([bench.name_of(p) for i, p in enumerate(points) if i not in chosen],
                         ["tp 2, 4 x 8", "pp 2, 1f1b, 8 x 4", "pp 2, zero_bubble, 16 x 2", "tp 2, 1 x 76",
                          "pp 2, interleaved, 8 x 4"])
        self.assertNotEqual(chosen, bench.calibrating(points, 0.7, 2))
        self.assertEqual(len(bench.calibrating(points, 0.5, 1)), 9)
        self.assertEqual(len(bench.calibrating(points[:3], 0.95, 1)), 2)  # one is held out, however few there are
        self.assertEqual(bench.calibrating(points[:1], 0.95, 1), set())

    def test_points_are_different_and_of_their_number_of_gpus(self):
        for gpus in bench.POINTS:
            points = bench.POINTS[gpus] + bench.TOO_LARGE[gpus] + (bench.RESERVE if gpus == 2 else [])
            self.assertEqual(len({bench.name_of(p) for p in points}), len(points))
            self.assertLessEqual(max(map(bench.gpus_of, points)), gpus)
            self.assertGreaterEqual(len(bench.POINTS[gpus]), 14)
            self.assertGreaterEqual(len(bench.TOO_LARGE[gpus]), 4)

    def test_the_trainer_is_asked_for_the_point(self):
        class Options:
            tutti, model, warmup, steps = "transformer", "gpt2-124m", 1, 4

        def line(p):
            return " ".join(bench.line_of(Options, "f", p))
        self.assertIn("--gpus 2 --pipeline 3d --tp 1 --pp 2 --dp 1 --zero 0 --recompute 3 --pipeline-schedule zb-v --model "
                      "gpt2-124m --batch 32 --micro-batch 4 ",
                      line(bench.point(1, 2, 1, 8, 4, schedule="zero_bubble_v", recompute="stages")))
        self.assertIn("--gpus 2 --pipeline 3d --tp 1 --pp 1 --dp 2 --zero 3 --recompute 0 --model gpt2-124m --batch 16 "
                      "--micro-batch 2 ",
                      line(bench.point(1, 1, 2, 4, 2, zero_stage=3)))
        shared = bench.point(1, 2, 1, 8, 4, schedule="dual_pipe", sp=2)
        self.assertIn("--gpus 4 --pipeline 3d --tp 1 --pp 2 --dp 1 --zero 0 --recompute 0 --pipeline-schedule dualpipe --sp 2 "
                      "--model", line(shared))
        self.assertEqual(bench.name_of(shared), "pp 2, sp 2, dual_pipe, 8 x 4")
        self.assertEqual(bench.point(**shared), shared)
        self.assertTrue(line(bench.point(1, 1, 1, 1, 1)).endswith("--steps 5 --eval-every 5 --quiet --report f/report.json"))


class Order(unittest.TestCase):
    def test_tau(self):
        self.assertEqual(bench.kendall([(1, 1), (2, 2), (3, 3)]), 1)
        self.assertEqual(bench.kendall([(1, 3), (2, 2), (3, 1)]), -1)
        self.assertAlmostEqual(bench.kendall([(1, 1), (2, 3), (3, 2)]), 1 / 3)
        self.assertEqual(bench.kendall([(1, 2), (2, 2)]), -1)  # no order is no right order

    def test_what_is_within_3_percent_has_no_order(self):
        self.assertIsNone(bench.kendall([(1, 2), (1.02, 1)]))
        self.assertEqual(bench.kendall([(1, 2), (1.02, 1), (2, 3)]), 1)
        self.assertEqual(bench.kendall([(1.04, 1), (1, 2)]), -1)


class Run(unittest.TestCase):
    def test_steps_of_a_known_machine_are_foretold(self):
        folder = Folder(self, ten())
        held_out = [i for i in range(10) if i not in bench.calibrating(ten(), 0.7, 1)]
        late, (seconds, gib) = held_out[0], folder.truth[key_of(ten()[held_out[0]])]
        folder.truth[key_of(ten()[late])] = [1.25 * seconds, 2 * gib]
        said = folder.run("--splits", "3", "--picture", folder.path / "picture.svg", "--save-machine",
                          folder.path / "machine.json")
        report = folder.read("report.json")
        rows, summary = report["points"], report["summary"]
        self.assertEqual([i for i, row in enumerate(rows) if not row["calibrates"]], held_out)
        for i, row in enumerate(rows):
            self.assertAlmostEqual(row["error"], 1 / 1.25 - 1 if i == late else 0)
            self.assertAlmostEqual(row["memory_error"], -0.5 if i == late else 0)
        self.assertAlmostEqual(summary["worst error"], 0.2)
        self.assertAlmostEqual(summary["median error"], 0)
        self.assertAlmostEqual(summary["worst error of memory"], 0.5)
        self.assertEqual((summary["calibrating"], summary["held out"], summary["ran out of memory"]), (7, 3, 0))
        self.assertEqual(summary["other choices"]["splits"], 3)
        self.assertGreaterEqual(summary["other choices"]["largest worst error"], 0.2 - 1e-9)
        self.assertIn("worst error: 0.200 (goal: at most 0.15)", said)
        self.assertEqual(len(folder.read("machine.json")["steps"]), 7)
        shapes = [e.tag.split("}")[1] for e in xml.parse(folder.path / "picture.svg").iter()]
        self.assertEqual(shapes.count("circle"), 2 * 10 + 4)  # and four kinds
        self.assertEqual(shapes.count("path"), 0)
        # The report alone gives the same, and nothing is run.
        before = folder.runs()
        folder.run("--measured", folder.path / "report.json", "--splits", "3")
        again = folder.read("report.json")
        self.assertEqual(again["summary"], summary)
        self.assertEqual(folder.runs(), before)
        self.assertEqual(len(before), 10)

    def test_efficiencies_are_those_of_the_calibrating_points(self):
        folder = Folder(self, ten())
        for answer in folder.truth.values():
            answer[0] *= 0.9
        folder.run("--splits", "0")
        report = folder.read("report.json")
        self.assertGreater(report["machine"]["product_efficiency"], 0.67)
        self.assertLess(report["summary"]["worst error"], 0.03)
        self.assertAlmostEqual(report["summary"]["worst error, calibrated by no step"], 1 / 0.9 - 1)

    def test_memory_has_two_sides_and_failures_are_tried_again(self):
        points = ten() + [bench.point(1, 1, 1, 1, 43), bench.point(1, 1, 1, 1, 52), bench.point(1, 1, 1, 1, 60)]
        folder = Folder(self, points)
        sound = dict(folder.truth)
        full = "device 0 has no room for 3 GiB: 130 GiB are held here (cudaErrorMemoryAllocation: out of memory)"
        for p in (points[11], points[12], points[9]):  # the last of these is predicted to fit
            folder.truth[key_of(p)] = full
        folder.truth[key_of(points[1])] = "a cable is loose"
        folder.truth[key_of(points[2])] = "slow"
        folder.run("--splits", "0", "--limit", "2", "--picture", folder.path / "picture.svg")
        report = folder.read("report.json")
        by_name = {bench.name_of(row["point"]): row for row in report["points"]}
        self.assertEqual(by_name["1 GPU, 1 x 52"]["out_of_memory"], "transformer: " + full)
        self.assertEqual(by_name["dp 2, ZeRO-1, 4 x 4"]["failed"], "transformer: a cable is loose")
        self.assertIn("did not end within 2 s", by_name["dp 2, ZeRO-2, 4 x 4"]["failed"])
        summary = report["summary"]
        self.assertEqual((summary["failed otherwise"], summary["ran out of memory"]), (2, 3))
        self.assertEqual(summary["ran out of memory, predicted to fit"], 1)
        self.assertEqual(summary["ran, predicted not to fit"], 1)  # 43 sequences: 131.5 of the data sheet's 131.3 GiB
        shapes = [e.tag.split("}")[1] for e in xml.parse(folder.path / "picture.svg").iter()]
        self.assertEqual(shapes.count("path"), 3)
        # What is done is done; what failed is not.
        before = folder.runs()
        folder.truth = sound | {key_of(points[9]): full}
        folder.run("--splits", "0", "--resume")
        self.assertEqual(folder.runs()[len(before):], [key_of(points[1]), key_of(points[2])])
        self.assertEqual(folder.read("report.json")["summary"]["failed otherwise"], 0)
        self.assertEqual(folder.read("report.json")["summary"]["ran out of memory"], 3)

    def test_steps_of_another_model_are_not_gone_on_with(self):
        folder = Folder(self, ten())
        folder.run("--splits", "0")
        before, report = folder.runs(), folder.read("report.json")
        said = folder.run("--splits", "0", "--resume", "--model", "gpt2-124m", code=1)
        self.assertIn("report.json are of gpt2-1558m, not of gpt2-124m", said)
        self.assertEqual((folder.runs(), folder.read("report.json")), (before, report))

    def test_few_points_and_a_large_share_leave_one_to_judge_by(self):
        folder = Folder(self, ten()[:3])
        folder.run("--splits", "2", "--share", "0.9")
        self.assertEqual(folder.read("report.json")["summary"]["held out"], 1)
        self.assertEqual(folder.read("report.json")["summary"]["other choices"]["splits"], 2)

    def test_a_budget_leaves_out_the_last_points(self):
        folder = Folder(self, ten())
        said = folder.run("--splits", "0", "--budget", "0", code=1)
        self.assertEqual(folder.runs(), [])
        self.assertIn("1 GPU, 1 x 32: left out, --budget 0 is used up", said)
        self.assertIn("0 points ran, of which 0 do not calibrate: too few to compare", said)

    def test_what_makes_no_sense_is_refused(self):
        folder = Folder(self, ten())
        self.assertIn("--share is between 0 and 1", folder.run("--share", "1", code=1))
        self.assertIn("are at least 1", folder.run("--warmup", "0", code=1))
        folder.write("points.json", [{"tp": 1}])
        self.assertIn("plan_versus_measured.py: ", folder.run(code=1))
        self.assertEqual(folder.runs(), [])


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
