#!/usr/bin/env python3
"""Plays every case of test/suite COPIES times, each on a port of its own, until stdin ends.

usage: replays.py COPIES < pipe

Prints one line of JSON, case id → ports, when all listen. A line on stdin has every
script enter its last phase, and is answered by a line.
"""
import glob
import json
import os
import sys

SUITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../test/suite")
sys.dont_write_bytecode = True
sys.path.insert(0, SUITE)
from replay import Replay  # noqa: E402

cases = [json.load(open(f)) for f in sorted(glob.glob(SUITE + "/cases/*.json"))]
played = [(c, [Replay(c).start() for _ in range(int(sys.argv[1]))]) for c in cases]
print(json.dumps({c["id"]: [r.port for r in rs] for c, rs in played}), flush=True)
for _ in sys.stdin:
    for c, rs in played:
        for r in rs:
            r.enter(max(run.get("phase", 1) for run in c["probe"].get("runs", [{}])))
    print("entered", flush=True)
