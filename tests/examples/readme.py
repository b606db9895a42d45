#!/usr/bin/env python3
"""What the documents show is what is there: readme.py SOURCE_FOLDER

C++ stands in a program or test that is compiled and run, word for word but for indentation (a line "// ..." leaves
something out, in one file, in order). Links, pictures, headings, headers and files that are named exist, and so do the
commands of ./dev. Command lines of the trainer are parsed by trainer.options.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(sys.argv[1])
DOCUMENTS = ["README.md", "examples/transformer/README.md", "bench/results/README.md"]
SOURCES = sorted([*ROOT.glob("examples/*/*.cpp"), *ROOT.glob("tests/examples/*.cpp")])
LEAST_BLOCKS = 15  # of C++ in README.md: fewer means that they are no longer found

problems = []


def words(text):
    """Lines without what an indentation changes, and without the marks of existing_trainer."""
    lines = (re.sub(r"\s+", " ", line.replace("//+", "")).strip() for line in text.splitlines())
    return "\n" + "\n".join(line for line in lines if line) + "\n"


def is_tested(block):
    parts = [words(p) for p in re.split(r"^\s*// \.\.\.\s*$", block, flags=re.M)]
    for code in code_of_sources:
        at = 0
        for part in parts:
            at = code.find(part, at)
            if at < 0:
                break
        else:
            return True
    return False


def anchor_of(heading):
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


code_of_sources = [words(s.read_text()) for s in SOURCES]
commands = set(re.findall(r"^    ([a-z-]+)(?: \||\))", (ROOT / "dev").read_text(), flags=re.M)) | {"help"}
for name in DOCUMENTS:
    document = ROOT / name
    text = document.read_text()
    complain = lambda what: problems.append(f"{name}: {what}")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    cpp = [body for language, body in blocks if language == "cpp"]
    if name == "README.md" and len(cpp) < LEAST_BLOCKS:
        complain(f"has {len(cpp)} blocks of C++, not {LEAST_BLOCKS}")
    for body in cpp:
        if not is_tested(body):
            complain("shows C++ that stands in no example and no test:\n" + body)

    anchors = {anchor_of(h) for h in re.findall(r"^#+ (.*)$", prose, flags=re.M)}
    for target in re.findall(r"\]\(([^)]+)\)", prose):
        path, _, anchor = target.partition("#")
        if re.match(r"https?:", target):
            continue
        if path and not (document.parent / path).exists():
            complain(f"links '{target}', which is not there")
        if not path and anchor not in anchors:
            complain(f"links '#{anchor}', but has no such heading")

    for header in re.findall(r"<(tutti/[\w/]+\.\w+)>", text):
        if not (ROOT / "include" / header).exists():
            complain(f"names <{header}>, which is not there")
    for path in re.findall(r"`([\w./-]+\.(?:py|hpp|cuh|cpp|cu|cmake|json|svg))`", prose):
        folders = [ROOT, ROOT / "include/tutti", ROOT / "include/tutti/tutti", ROOT / "bench", document.parent]
        written = path.startswith("run/") or path in ("trace.json", "plan.json", "report.json")
        if not written and not any((folder / path).exists() for folder in folders):
            complain(f"names {path}, which is not there")
    for command in re.findall(r"\./dev ([a-z-]+)", text):
        if command not in commands:
            complain(f"says './dev {command}', which dev does not know")

for problem in problems:
    print(problem)
sys.exit(1 if problems else 0)
