#!/usr/bin/env python3
"""Runs our Caddy as the edge of edge.py.

usage: edge.py --applies caddy --edge 'python3 drivers/caddy.py --listen {listen} --control {control}'
"""
import argparse
import json
import os

p = argparse.ArgumentParser()
p.add_argument("--listen", type=int)
p.add_argument("--control")
a = p.parse_args()
work = os.path.dirname(a.control)
c = json.load(open(a.control))

checks = "".join("\t\tcheck_%s %s\n" % (k, c[k]) for k in ("interval", "timeout", "fall") if k in c)
text = """{
	admin off
	auto_https off
	persist_config off
	grace_period 1s
}
http://127.0.0.1:%d, http://%s:%d {
	bind 127.0.0.1
	mcp_proxy %s {
		hold %s
		check_path %s
%s%s	}
}
""" % (a.listen, c["host"], a.listen, " ".join(u[7:] for u in c["upstreams"]), c["hold"], c["path"], checks, "\t\tsticky\n" if c.get("sticky") else "")
with open(work + "/Caddyfile", "w") as o:
    o.write(text)
caddy = os.environ.get("CADDY", os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../bin/caddy"))
os.environ["XDG_CONFIG_HOME"] = os.environ["XDG_DATA_HOME"] = work
os.execv(caddy, [caddy, "run", "--config", work + "/Caddyfile", "--adapter", "caddyfile"])
