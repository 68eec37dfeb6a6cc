#!/usr/bin/env python3
"""Runs our plugin in a real Traefik as the edge of edge.py.

usage: edge.py --applies traefik --edge 'python3 drivers/traefik.py --listen {listen} --control {control}'
$TRAEFIK is the binary; by default the one that test/traefik builds.
"""
import argparse
import json
import os
import signal
import subprocess
import sys
import time

p = argparse.ArgumentParser()
p.add_argument("--listen", type=int)
p.add_argument("--control")
a = p.parse_args()
work = os.path.dirname(a.control)
module = "github.com/mcphealth/mcphealth"
root = os.environ.get("MCPHEALTH", os.path.realpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../..")))
binary = os.environ.get("TRAEFIK", root + "/test/e2e/.cache/bin/traefik")


def write(name, x):  # JSON is YAML; replaced in one step, from outside the watched folder
    with open(work + "/new", "w") as o:
        json.dump(x, o)
    os.replace(work + "/new", work + "/" + name)


def dynamic():
    """The middleware on the service's router, which goes and comes, and on its fallback."""
    c = json.load(open(a.control))
    rule = "Host(`%s`) && (Path(`%s`) || PathPrefix(`/.well-known/`))" % (c["host"], c["path"])
    plugin = {"paths": [c["path"]], **{k: c[k] for k in ("hold", "absentAfter", "interval", "timeout", "fall", "sticky") if k in c}}
    h = {
        "middlewares": {"again": {"retry": {"attempts": 4, "initialInterval": "20ms"}}, "mcp": {"plugin": {"mcphealth": plugin}}},
        "routers": {"mcp-fallback": {"rule": rule, "priority": 1, "service": "noop@internal", "middlewares": ["mcp"]}},
        "serversTransports": {"fresh": {"maxIdleConnsPerHost": -1}},
        "services": {"mcp": {"loadBalancer": {"serversTransport": "fresh", "servers": [{"url": u} for u in c["upstreams"]]}}},
    }
    if c.get("sticky"):
        h["services"]["mcp"]["loadBalancer"]["sticky"] = {"cookie": {"name": "mcp"}}
    if c["route"]:
        h["routers"]["mcp"] = {"rule": rule, "service": "mcp", "middlewares": ["again", "mcp"]}
    write("dyn/dyn.yml", {"http": h})


os.makedirs(work + "/plugins-local/src/github.com/mcphealth", exist_ok=True)
os.symlink(root, work + "/plugins-local/src/" + module)
os.makedirs(work + "/dyn")
dynamic()
write("static.yml", {
    "global": {"checkNewVersion": False, "sendAnonymousUsage": False},
    "entryPoints": {"web": {"address": "127.0.0.1:%d" % a.listen}},
    "providers": {"providersThrottleDuration": "50ms", "file": {"directory": work + "/dyn", "watch": True}},
    "log": {"level": "DEBUG"}, "experimental": {"abortOnPluginFailure": True, "localPlugins": {"mcphealth": {"moduleName": module}}},
})
proc = subprocess.Popen([binary, "--configFile=" + work + "/static.yml"], cwd=work)
signal.signal(signal.SIGTERM, lambda *_: (proc.terminate(), sys.exit(0)))
seen = os.stat(a.control).st_mtime_ns
while proc.poll() is None:
    time.sleep(0.03)
    m = os.stat(a.control).st_mtime_ns
    if m != seen:
        seen = m
        dynamic()
sys.exit(proc.returncode)
