"""What every driver of a peer has in common.

A driver is two processes of one script: the initiator, which `kvlane bench` starts and speaks with,
and the target, which the initiator starts. Both hold a pool and read one JSON line at a time from
standard input; each gets one JSON line as the answer. Both draw the same random pages from a seed,
so that only seeds cross. Between two lines both block, and so leave the machine to others.
"""

import ctypes
import importlib
import json
import mmap
import os
import random
import subprocess
import sys
import time
from importlib import metadata

LIMIT_S = 60.0
# A prime length, so that two pages of a pool hardly ever begin alike.
PATTERN = random.Random(20).randbytes(1048583)


def own_output():
    """Keeps standard output for answers; what a package prints goes to standard error."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


class Pool:
    """Anonymous memory that both have at hand by address, every page touched."""

    def __init__(self, size, filled):
        self.map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.size = size
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        for at in range(0, size, len(PATTERN)):
            n = min(len(PATTERN), size - at)
            self.map[at : at + n] = PATTERN[:n] if filled else bytes(n)


def expected(at, n):
    start = at % len(PATTERN)
    return (PATTERN * ((start + n) // len(PATTERN) + 1))[start : start + n]


def draw(row, seed, pages):
    """Source and destination blocks, each distinct, in random order."""
    dice = random.Random(seed)
    blocks = range(row["pool_blocks"])
    return dice.sample(blocks, pages), dice.sample(blocks, pages)


def clear(pool, row, seed, pages):
    size = row["page_bytes"]
    for block in draw(row, seed, pages)[1]:
        pool.map[block * size : (block + 1) * size] = bytes(size)


def check(pool, row, seed, pages):
    """Compares every page of a draw; says how many bytes that were."""
    size = row["page_bytes"]
    for source, block in zip(*draw(row, seed, pages)):
        if pool.map[block * size : (block + 1) * size] != expected(source * size, size):
            raise RuntimeError(f"block {block} of the target is not what was sent")
    return size * pages


def until(what, done):
    """Polls until `done` gives something true."""
    begun = time.monotonic()
    turns = 0
    while True:
        found = done()
        if found:
            return found
        turns += 1
        if turns % 4096 == 0 and time.monotonic() - begun > LIMIT_S:
            raise TimeoutError(f"{what} did not come within {LIMIT_S:.0f} s")


class Target:
    """The initiator's hold on its target."""

    def __init__(self, script, size):
        self.process = subprocess.Popen(
            [sys.executable, script, "target", str(size)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.hello = self.hear()

    def say(self, **ask):
        self.process.stdin.write(json.dumps(ask) + "\n")
        self.process.stdin.flush()

    def hear(self):
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("the target has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"target: {answer['error']}")
        return answer

    def ask(self, **ask):
        self.say(**ask)
        return self.hear()


def serve(start):
    """Answers line by line; `start` gives the first answer and a function for the others."""
    out = own_output()

    def answer(it):
        out.write(json.dumps(it) + "\n")
        out.flush()

    try:
        hello, carry_out = start()
        answer(hello)
        for line in sys.stdin:
            answer(carry_out(json.loads(line)))
    except Exception as e:  # Whatever it is, the bench is to know it.
        answer({"error": f"{type(e).__name__}: {e}"})
    out.flush()
    # Destructors of the packages are not to be relied on.
    os._exit(0)


class Missing(Exception):
    """What could not be imported."""


def imports(*wanted):
    """One module for each list of names, the first that can be imported."""
    found, missing = [], []
    for names in wanted:
        tried = []
        for name in names:
            try:
                found.append(importlib.import_module(name))
                break
            except Exception as e:  # A library that a module needs may be what is missing.
                tried.append(f"import {name}: {type(e).__name__}: {e}")
        else:
            missing += tried
    if missing:
        raise Missing("; ".join(missing))
    return found


def version(packages):
    for package in packages:
        try:
            return f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            pass
    return "unknown"


def main(initiator, target):
    """Runs the role that the command line names. Each role is a function of the pool's size."""
    role, size = sys.argv[1], int(sys.argv[2])

    def start():
        try:
            return (initiator if role == "initiator" else target)(size)
        except Missing as e:
            if role == "target":
                raise
            return {"missing": str(e)}, lambda ask: {}

    serve(start)
