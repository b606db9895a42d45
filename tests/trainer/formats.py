"""formats.py TRANSFORMER: the trainer reads files that this script writes byte by byte, computes the loss that the
script computes, and writes a file that the script reads. Needs nothing beyond Python's standard library.
"""

import json
import math
import os
import random
import struct
import subprocess
import sys
import tempfile

VOCABULARY, CONTEXT, LAYERS, HEADS, WIDTH = 50257, 8, 2, 2, 8
numbers = random.Random(1)


def packed(kind, values):
    """The values' bytes in F32, F16 or BF16, and the values that these bytes stand for."""
    if kind == "BF16":  # the upper half of an F32, truncated
        halves = [struct.pack("<f", x)[2:] for x in values]
        return b"".join(halves), [struct.unpack("<f", b"\0\0" + h)[0] for h in halves]
    form = "<%d%s" % (len(values), {"F32": "f", "F16": "e"}[kind])
    data = struct.pack(form, *values)
    return data, list(struct.unpack(form, data))


def write_weights(path):
    """GPT-2's tensors with masks and a tied head, their types mixed; returns {name: (shape, values)}."""
    shapes = {"wte.weight": [VOCABULARY, WIDTH], "wpe.weight": [CONTEXT, WIDTH]}
    for h in ["h.%d." % i for i in range(LAYERS)]:
        for norm in "ln_1", "ln_2":
            shapes[h + norm + ".weight"] = shapes[h + norm + ".bias"] = [WIDTH]
        for name, ins, outs in (("attn.c_attn", 1, 3), ("attn.c_proj", 1, 1), ("mlp.c_fc", 1, 4), ("mlp.c_proj", 4, 1)):
            shapes[h + name + ".weight"] = [ins * WIDTH, outs * WIDTH]
            shapes[h + name + ".bias"] = [outs * WIDTH]
    shapes["ln_f.weight"] = shapes["ln_f.bias"] = [WIDTH]
    header, data, weights = {"__metadata__": {"format": "pt"}}, b"", {}

    def add(name, kind, shape, content):
        nonlocal data
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content

    for i, (name, shape) in enumerate(shapes.items()):
        kind = ("F32", "F16", "BF16")[i % 3]
        content, values = packed(kind, [numbers.gauss(0, 0.5) for _ in range(math.prod(shape))])
        weights[name] = shape, values
        add("transformer." + name, kind, shape, content)
        if name == "wte.weight":
            add("lm_head.weight", kind, shape, content)
    for i in range(LAYERS):
        add("transformer.h.%d.attn.bias" % i, "U8", [1, 1, CONTEXT, CONTEXT], bytes(CONTEXT * CONTEXT))
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
    return weights


def read_weights(path):
    with open(path, "rb") as file:
        content = file.read()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8:8 + length]), content[8 + length:]
    assert header.pop("__metadata__") == {"format": "pt"}
    read = {}
    for name, entry in header.items():
        assert entry["dtype"] == "F32", name
        first, last = entry["data_offsets"]
        read[name] = entry["shape"], list(struct.unpack("<%df" % ((last - first) // 4), data[first:last]))
    return read


def write_tokens(path, tokens):
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253))
        file.write(struct.pack("<%dH" % len(tokens), *tokens))


def losses(weights, ins, targets):
    """-ln p of each target: GPT-2's forward pass, a row after the other."""
    def row(name, i):
        width = weights[name][0][-1]
        return weights[name][1][i * width:(i + 1) * width]

    def norm(name, x):
        mean = sum(x) / WIDTH
        scale = 1 / math.sqrt(sum((v - mean) ** 2 for v in x) / WIDTH + 1e-5)
        return [(v - mean) * scale * g + b for v, g, b in zip(x, row(name + ".weight", 0), row(name + ".bias", 0))]

    def linear(name, x):
        out = list(row(name + ".bias", 0))
        for i, v in enumerate(x):
            for j, w in enumerate(row(name + ".weight", i)):
                out[j] += v * w
        return out

    def gelu(v):
        return v / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v ** 3)))

    stream = [[a + b for a, b in zip(row("wte.weight", t), row("wpe.weight", i))] for i, t in enumerate(ins)]
    size = WIDTH // HEADS
    for h in ["h.%d." % i for i in range(LAYERS)]:
        qkv = [linear(h + "attn.c_attn", norm(h + "ln_1", x)) for x in stream]
        for i, x in enumerate(stream):
            attended = []
            for head in range(0, WIDTH, size):
                q = qkv[i][head:head + size]
                weight = [math.exp(sum(a * b for a, b in zip(q, past[WIDTH + head:])) / math.sqrt(size))
                          for past in qkv[:i + 1]]
                attended += [sum(w * past[2 * WIDTH + head + c] for w, past in zip(weight, qkv)) / sum(weight)
                             for c in range(size)]
            stream[i] = [a + b for a, b in zip(x, linear(h + "attn.c_proj", attended))]
        for i, x in enumerate(stream):
            hidden = [gelu(v) for v in linear(h + "mlp.c_fc", norm(h + "ln_2", x))]
            stream[i] = [a + b for a, b in zip(x, linear(h + "mlp.c_proj", hidden))]
    out = []
    table = [row("wte.weight", v) for v in range(VOCABULARY)]
    for x, target in zip(stream, targets):
        x = norm("ln_f", x)
        logits = [sum(a * b for a, b in zip(x, w)) for w in table]
        largest = max(logits)
        out.append(largest - logits[target] + math.log(sum(math.exp(v - largest) for v in logits)))
    return out


def main():
    transformer = os.path.abspath(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        weights = write_weights("start.safetensors")
        validation = [numbers.randrange(VOCABULARY) for _ in range(2 * CONTEXT + 4)]
        write_tokens("train.bin", [numbers.randrange(VOCABULARY) for _ in range(100)] + [VOCABULARY - 1])
        write_tokens("validate.bin", validation)
        # A step so small that it changes nothing: what is evaluated and saved is what was loaded.
        sizes = "--layers %d --heads %d --width %d --context %d " % (LAYERS, HEADS, WIDTH, CONTEXT)
        arguments = ("--tokens train.bin --validation-tokens validate.bin --load start.safetensors --save end.safetensors "
                     "--ranks 2 --batch 2 --steps 1 --lr 1e-300 --precision double --quiet " + sizes)
        subprocess.run([transformer, *arguments.split()], check=True)
        saved = read_weights("end.safetensors")
        assert saved.keys() == weights.keys(), saved.keys() ^ weights.keys()
        for name, (shape, values) in weights.items():
            assert saved[name] == (shape, values), name
        with open("run/report.json") as file:
            found = json.load(file)["loss"]
        assert found["unit"] == "nats per token", found["unit"]
        each = []
        for first in range(0, len(validation) - 1, CONTEXT):
            window = validation[first:first + CONTEXT + 1]
            each += losses(weights, window[:-1], window[1:])
        expected = sum(each) / len(each)
        assert abs(found["validation"] / expected - 1) < 1e-12, (found["validation"], expected)
        print("validation loss", found["validation"], "expected", expected)


main()
