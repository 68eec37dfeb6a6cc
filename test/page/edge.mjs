// A real Caddy with our modules, and MCP servers in front of which it stands.
import { spawn } from "node:child_process";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import http from "node:http";
import net from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";

// Nothing that was started outlives the test.
const started = new Set();
process.on("exit", () => { for (const p of started) p.kill("SIGKILL"); });
for (const signal of ["SIGINT", "SIGTERM"]) process.on(signal, () => process.exit(1));

const root = join(import.meta.dirname, "../..");

async function freePort() {
	const probe = net.createServer();
	await new Promise((ok) => probe.listen(0, "127.0.0.1", ok));
	const { port } = probe.address();
	await new Promise((ok) => probe.close(ok));
	return port;
}

// Server is a small MCP server of 2026-07-28 that can be told to misbehave.
export class Server {
	constructor(info = {}) {
		this.info = { name: "notes", version: "2.4.1", ...info };
		this.delay = 0;
		this.answer = null; // (request, response) => answered otherwise
	}
	async start(port = 0) {
		this.http = http.createServer((req, res) => this.#serve(req, res));
		await new Promise((ok, no) => this.http.once("error", no).listen(port, "127.0.0.1", ok));
		this.port = this.http.address().port;
		this.address = `127.0.0.1:${this.port}`;
		return this;
	}
	async stop() {
		this.http.closeAllConnections();
		await new Promise((ok) => this.http.close(ok));
	}
	#serve(req, res) {
		let body = "";
		req.on("data", (b) => (body += b));
		req.on("end", async () => {
			if (this.delay) await sleep(this.delay);
			if (this.answer) return this.answer(req, res);
			let m = {};
			try { m = JSON.parse(body); } catch { /* no JSON: no id */ }
			res.writeHead(200, { "Content-Type": "application/json" });
			res.end(JSON.stringify({
				jsonrpc: "2.0", id: m.id ?? null,
				result: m.method === "server/discover"
					? { supportedVersions: ["2026-07-28"], capabilities: { tools: {} }, serverInfo: this.info }
					: { content: [] },
			}));
		});
	}
}

// Edge is a Caddy with one site per reverse proxy, and the page on a site of its own.
export class Edge {
	// site is what stands in the sites: a list of blocks; status the options of the page.
	static async start(sites, { status = "", check = "interval 1s\n fast 200ms" } = {}) {
		const e = new Edge();
		e.dir = mkdtempSync(join(tmpdir(), "mcp-page-"));
		e.port = await freePort();
		e.admin = await freePort();
		e.url = `http://127.0.0.1:${e.port}/status`;
		e.sites = [];
		for (const site of sites) e.sites.push({ site, port: await freePort() });
		e.config = `{
			admin 127.0.0.1:${e.admin}
			auto_https off
			persist_config off
			grace_period 2s
			log {
				level WARN
			}
			mcp_health {
				${check}
			}
		}
		http://127.0.0.1:${e.port} {
			mcp_status /status {
				${status}
			}
		}
		${e.sites.map(({ site, port }) => `http://127.0.0.1:${port} {\n${site}\n}`).join("\n")}`;
		writeFileSync(join(e.dir, "Caddyfile"), e.config);
		await e.run();
		return e;
	}
	async run() {
		this.process = spawn(process.env.CADDY ?? join(root, "bin/caddy"), ["run", "--config", join(this.dir, "Caddyfile"), "--adapter", "caddyfile"], {
			env: { ...process.env, XDG_CONFIG_HOME: this.dir, XDG_DATA_HOME: this.dir }, stdio: ["ignore", "ignore", "pipe"],
		});
		started.add(this.process);
		this.process.once("exit", () => started.delete(this.process));
		this.log = "";
		this.process.stderr.on("data", (b) => (this.log += b));
		for (let i = 0; ; i++) {
			try { await fetch(this.url); return; } catch (err) {
				if (i === 300 || this.process.exitCode !== null) throw new Error(`Caddy does not answer: ${err}\n${this.log}`);
				await sleep(100);
			}
		}
	}
	async reload() {
		await this.ask("/load", { method: "POST", headers: { "Content-Type": "text/caddyfile", "Cache-Control": "must-revalidate" } }, this.config);
	}
	// ask asks the admin endpoint, which takes fetch for a browser and refuses it.
	async ask(path, options = {}, body = "") {
		const res = await new Promise((ok, no) => http.request({ port: this.admin, path, ...options }, ok).once("error", no).end(body));
		let text = "";
		for await (const b of res.setEncoding("utf8")) text += b;
		if (res.statusCode !== 200) throw new Error(`${path}: ${res.statusCode} ${text}`);
		return text;
	}
	async json() { return (await fetch(this.url, { headers: { Accept: "application/json" } })).json(); }
	// until waits until the JSON is as ok wants it.
	async until(ok, what) {
		for (let i = 0; i < 300; i++) {
			const doc = await this.json();
			if (ok(doc)) return doc;
			await sleep(100);
		}
		throw new Error(`not ${what} within 30 s: ${JSON.stringify((await this.json()).counts)}`);
	}
	// call makes n tool calls at a site.
	async call(i, n = 1, path = "/mcp") {
		for (; n > 0; n--) {
			const r = await fetch(`http://127.0.0.1:${this.sites[i].port}${path}`, {
				method: "POST", headers: { "Content-Type": "application/json" },
				body: JSON.stringify({ jsonrpc: "2.0", id: n, method: "tools/call", params: { name: "echo" } }),
			});
			await r.arrayBuffer();
		}
	}
	async stop() {
		if (this.process.exitCode === null) {
			const ended = new Promise((ok) => this.process.once("exit", ok));
			this.process.kill("SIGTERM");
			await ended;
		}
		rmSync(this.dir, { recursive: true, force: true });
	}
}

// metrics reads what Caddy exports, and returns a look-up.
export async function metrics(edge) {
	const text = await edge.ask("/metrics");
	const series = [];
	for (const [, name, labels, value] of text.matchAll(/^(\w+)\{(.*)\} (\S+)$/gm)) {
		series.push({ name, labels: Object.fromEntries([...labels.matchAll(/(\w+)="([^"]*)"/g)].map((m) => [m[1], m[2]])), value: Number(value) });
	}
	return (name, labels) => series.find((s) => s.name === name && Object.entries(labels).every(([k, v]) => s.labels[k] === v))?.value;
}
