// The status page in a real browser, in front of a real Caddy.
import assert from "node:assert/strict";
import { mkdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { after, afterEach, before, describe, test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { chromium } from "playwright-core";
import { Edge, Server, metrics } from "./edge.mjs";

const axe = readFileSync(new URL("node_modules/axe-core/axe.min.js", import.meta.url), "utf8");
const shots = process.env.PAGE_SHOTS ?? join(import.meta.dirname, "shots");
const sizes = {
	phone: { viewport: { width: 360, height: 780 }, isMobile: true, hasTouch: true },
	desk: { viewport: { width: 1280, height: 800 } },
	wall: { viewport: { width: 2560, height: 1440 } },
};

let browser;
before(async () => {
	mkdirSync(shots, { recursive: true });
	browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? "/usr/bin/chromium", args: ["--no-sandbox", "--disable-dev-shm-usage"] });
});
after(() => browser?.close());

// open opens the page, and fails the test for whatever goes wrong in it.
const contexts = [];
async function open(edge, { size = "desk", query = "", scriptless = "", clock = false, ...options } = {}) {
	const context = await browser.newContext({ ...sizes[size], ...options });
	contexts.push(context);
	const page = await context.newPage();
	page.wrong = [];
	page.on("console", (m) => m.type() === "error" && !page.mayFail && page.wrong.push(m.text()));
	page.on("pageerror", (e) => page.wrong.push(String(e)));
	page.on("dialog", (d) => { page.wrong.push(`dialog: ${d.message()}`); d.dismiss(); });
	page.on("request", (r) => { if (!r.url().startsWith(edge.url) && !r.url().startsWith("data:")) page.wrong.push(`request to ${r.url()}`); });
	if (clock) await page.clock.install();
	if (scriptless) await page.route(edge.url, (route) => route.fulfill({ contentType: "text/html", body: scriptless }));
	await page.goto(edge.url + query);
	if (options.javaScriptEnabled !== false && !scriptless) await page.getByText("Live", { exact: true }).waitFor();
	return page;
}
afterEach(async () => {
	for (const c of contexts.splice(0)) {
		const wrong = c.pages().flatMap((p) => p.wrong);
		await c.close();
		assert.deepEqual(wrong, []);
	}
});

async function violations(page, exclude = []) {
	await page.evaluate(axe);
	const { violations } = await page.evaluate((exclude) => axe.run({ include: [["html"]], exclude }, { resultTypes: ["violations"] }), exclude);
	return violations.map((v) => `${v.id}: ${v.nodes.slice(0, 3).map((n) => `${n.html.slice(0, 150)} ${n.failureSummary}`).join("; ")}`);
}
const accessible = async (page, what, exclude) => assert.deepEqual(await violations(page, exclude), [], what);
const shot = (page, name, fullPage = false) => page.screenshot({ path: join(shots, name + ".png"), fullPage });
const wide = (page) => page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
const eventually = async (f, what) => {
	for (let i = 0; !(await f()); i++) {
		if (i === 300) assert.fail(`not within 30 s: ${what}`);
		await sleep(100);
	}
};

describe("a few upstreams, of which some are broken", () => {
	let edge, servers, notes, old, hostile, billing;
	before(async () => {
		servers = [notes, old, , hostile, billing] = await Promise.all([
			new Server().start(), new Server({ version: "2.4.0" }).start(), new Server().start(),
			new Server({ name: "<script>alert(1)</script>", version: "<b>9</b>" }).start(), new Server({ name: "billing", version: "0.9" }).start(),
		]);
		edge = await Edge.start([
			`mcp_proxy /mcp* ${servers.slice(0, 3).map((s) => s.address).join(" ")} {
				check_slow_after 1s
				hold 0
			}`,
			`mcp_proxy /search/mcp* ${hostile.address} {
				check_path /search/mcp
			}`,
			`mcp_proxy /billing/mcp* ${billing.address} {
				check_path /billing/mcp
				check_header Authorization "Bearer never-to-be-seen"
				hold 0
			}`,
		]);
		await edge.until((d) => d.counts.up === 5, "all up");
	});
	after(async () => { await edge?.stop(); await Promise.all(servers.map((s) => s.stop())); });

	test("axe would find what is wrong", async () => {
		const page = await open(edge);
		await page.evaluate(() => { document.querySelector("h1").style.color = "#999"; document.documentElement.removeAttribute("lang"); });
		assert.deepEqual((await violations(page)).map((v) => v.split(":")[0]).sort(), ["color-contrast", "html-has-lang"]);
	});

	test("all is well, at a glance", async () => {
		for (const colorScheme of ["light", "dark"]) {
			const page = await open(edge, { size: "wall", colorScheme });
			assert.equal(await page.locator("h1").textContent(), "All 5 upstreams are up");
			assert.equal(await page.title(), "✓ All 5 upstreams are up");
			assert.match(await page.locator("#icon").getAttribute("href"), /^data:image\/svg/);
			assert.equal(await page.locator(".row[open]").count(), 0);
			await accessible(page, colorScheme);
			await shot(page, `good-wall-${colorScheme}`);
		}
	});

	test("it shows text of servers as text", async () => {
		const page = await open(edge);
		await page.locator(".row", { hasText: hostile.address }).locator("summary").first().click();
		await page.getByText("<script>alert(1)</script> <b>9</b>").waitFor();
	});

	test("a server dies: the page tells without a reload, and that it is back", async () => {
		const page = await open(edge);
		await page.evaluate(() => (window.same = true));
		const icon = await page.locator("#icon").getAttribute("href");
		const { port } = notes;
		await notes.stop();
		await page.getByText("1 of 5 upstreams is down").waitFor();
		const row = page.locator(".row.down");
		assert.ok(await row.evaluate((el) => el.open), "it is opened");
		await row.getByText("Start the server; check address and port.").waitFor();
		assert.match(await page.title(), /^▲ 1 of 5/);
		assert.notEqual(await page.locator("#icon").getAttribute("href"), icon);
		await eventually(async () => (await page.locator("#say").textContent()).includes(`${notes.address} /mcp is down: refused.`), "it is announced");
		assert.ok(await page.locator("#changes").getByText(notes.address).isVisible());

		await notes.start(port);
		await page.getByText("All 5 upstreams are up").waitFor();
		assert.equal(await page.locator(".row.down").count(), 0);
		assert.ok(await page.evaluate(() => window.same), "the page was not loaded again");
	});

	test("what is broken comes first, in words, with what to do", async () => {
		billing.answer = (_, res) => { res.writeHead(200, { "Content-Type": "text/html" }); res.end("<!doctype html><title>Sign in</title>"); };
		old.delay = 1200;
		await notes.stop();
		await edge.until((d) => d.counts.down === 2 && d.counts.degraded === 1, "two down, one degraded");
		for (const [size, colorScheme] of [["desk", "light"], ["desk", "dark"], ["phone", "light"], ["phone", "dark"], ["wall", "dark"]]) {
			const page = await open(edge, { size, colorScheme });
			assert.equal(await page.locator("h1").textContent(), "/billing/mcp is down");
			assert.ok(await page.locator(".budget", { hasText: "/billing/mcp" }).getByText("being spent").isVisible());
			assert.match(await page.title(), /^✕ /);
			assert.deepEqual(await page.locator("main .row:visible .state").allTextContents(), ["down", "down", "degraded", "up", "up"]);
			await page.getByText("Check address and path: the wrong service has this port, or a page stands in front.").waitFor();
			assert.ok(await wide(page) <= 0, `${size}: the page is wider than the screen`);
			await accessible(page, `${size} ${colorScheme}`);
			assert.ok(!(await page.content()).includes("never-to-be-seen"));
			await shot(page, `bad-${size}-${colorScheme}`, size !== "wall");
		}
	});

	test("without JavaScript it says the same, and filters", async () => {
		const page = await open(edge, { javaScriptEnabled: false });
		assert.equal(await page.locator("h1").textContent(), "/billing/mcp is down");
		await page.getByText("Start the server; check address and port.").waitFor();
		await shot(page, "bad-noscript", true);
		await page.locator("#q").fill(notes.address);
		await page.getByRole("button", { name: "Apply" }).click();
		assert.deepEqual(await page.locator(".row:visible .name").allTextContents(), [notes.address]);
		assert.equal(await page.locator("#q").inputValue(), notes.address);
		await page.locator(".row:visible summary").first().click();
		assert.ok(!(await page.locator(".row:visible").evaluate((el) => el.open)), "it closes");
	});

	test("what is there without JavaScript is accessible, too", async () => {
		const body = await (await fetch(edge.url)).text(); // axe needs JavaScript: the page's own is taken out
		for (const colorScheme of ["light", "dark"]) {
			const page = await open(edge, { colorScheme, scriptless: body.replace(/<script>.*<\/script>/s, "") });
			assert.equal(await page.locator("html.js").count(), 0);
			assert.ok(await page.getByRole("link", { name: "Reload" }).isVisible());
			await accessible(page, colorScheme);
		}
	});

	test("by keyboard alone: skip, filter, open, and stay there while it changes", async () => {
		const page = await open(edge);
		const focused = () => page.evaluate(() => document.activeElement.id || document.activeElement.closest("[id]").id + " " + document.activeElement.tagName);
		await page.keyboard.press("Tab");
		assert.equal(await page.evaluate(() => document.activeElement.textContent), "Skip to the upstreams");
		await page.keyboard.press("Tab");
		assert.equal(await focused(), "q");
		await page.keyboard.type(servers[2].address);
		assert.equal(await page.locator("#found").textContent(), "1 of 5");
		assert.match(page.url(), /\?q=127/);
		await page.keyboard.press("Tab");
		assert.equal(await focused(), "show");
		await page.keyboard.press("Tab");
		const row = page.locator(".row:visible");
		assert.equal(await focused(), `${await row.getAttribute("id")} SUMMARY`);
		await page.keyboard.press("Enter");
		assert.ok(await row.evaluate((el) => el.open));

		// The upstream goes and comes: the row moves, and focus stays in it.
		servers[2].answer = (_, res) => { res.writeHead(500); res.end(); };
		await page.locator(".row.down:visible").waitFor();
		assert.equal(await focused(), `${await row.getAttribute("id")} SUMMARY`);
		assert.ok(await row.evaluate((el) => el.open));
		servers[2].answer = null;
		await page.locator(".row.up:visible").waitFor();
		assert.equal(await focused(), `${await row.getAttribute("id")} SUMMARY`);
	});

	test("only problems, and the address of the page remembers it", async () => {
		const page = await open(edge);
		await page.getByLabel("Problems only").check();
		assert.equal(await page.locator("#found").textContent(), "3 of 5");
		await page.reload();
		await page.getByText("Live", { exact: true }).waitFor();
		assert.ok(await page.getByLabel("Problems only").isChecked());
		assert.equal(await page.locator(".row:visible").count(), 3);
	});

	test("each number is that of the admin API and of the metrics", async () => {
		hostile.answer = null;
		await edge.call(1, 20, "/search/mcp");
		const page = await open(edge);
		const admin = JSON.parse(await edge.ask("/mcp_health/endpoints"));
		const series = await metrics(edge);
		for (const e of admin) for (const u of e.upstreams) {
			const labels = { upstream: u.upstream, path: u.path };
			assert.equal(series("caddy_mcp_health_upstream_up", labels), u.state === "up" || u.state === "degraded" ? 1 : 0);
			assert.equal(series("caddy_mcp_health_requests_total", { ...labels, outcome: "ok" }) ?? 0, u.requests.ok);
			assert.equal(await page.locator(".row", { hasText: u.upstream }).locator(".state").first().textContent(), u.state);
		}
		const search = admin.find((e) => e.path === "/search/mcp");
		assert.equal(search.requests.ok, 20);
		assert.ok(await page.locator(".budget", { hasText: "/search/mcp" }).getByText("within budget").isVisible());
		const shown = await page.locator(".budget", { hasText: "/search/mcp" }).locator("tr:nth-child(2) data").evaluateAll((all) => all.map((el) => Number(el.value)));
		assert.deepEqual(shown, search.availability.map((w) => w.burn_rate));
		assert.deepEqual(shown, search.availability.map((w) => series("caddy_mcp_health_burn_rate", { path: "/search/mcp", window: w.window })));
	});

	test("it survives a reload of the configuration, and says when it is not live", async () => {
		const page = await open(edge, { clock: true });
		await page.evaluate(() => (window.same = true));
		page.mayFail = true; // connections are refused meanwhile
		await edge.reload();
		await page.getByText("Live", { exact: true }).waitFor();
		edge.process.kill("SIGSTOP"); // it hangs: nothing tells the browser
		await page.clock.fastForward(40000);
		await page.locator("#stale").waitFor();
		assert.match(await page.locator("#stale").textContent(), /Not live/);
		assert.match(await page.title(), /^… /);
		edge.process.kill("SIGCONT");
		await page.locator("#stale").waitFor({ state: "hidden", timeout: 30000 });
		assert.ok(await page.evaluate(() => window.same));
	});
});

describe("500 upstreams", () => {
	let edge, servers;
	before(async () => {
		servers = await Promise.all(Array.from({ length: 500 }, () => new Server().start()));
		edge = await Edge.start([
			...Array.from({ length: 10 }, (_, i) => `mcp_proxy /team${i}/mcp* ${servers.slice(i * 40, i * 40 + 40).map((s) => s.address).join(" ")} {\n check_path /team${i}/mcp\n}`),
			`mcp_proxy /mcp* ${servers.slice(400).map((s) => s.address).join(" ")}`,
		], { check: "interval 10s\n fast 500ms" });
		for (const s of [servers[3], servers[417], servers[418]]) await s.stop();
		await edge.until((d) => d.counts.up === 497 && d.counts.down === 3, "497 up");
	});
	after(async () => { await edge?.stop(); await Promise.allSettled(servers.map((s) => s.stop())); });

	test("it is small, shows the three, and folds the rest", async (t) => {
		const start = Date.now();
		const body = await (await fetch(edge.url)).text();
		const served = Date.now() - start;
		const page = await open(edge);
		const timing = await page.evaluate(() => performance.getEntriesByType("navigation")[0].toJSON());
		t.diagnostic(`${Math.round(body.length / 1024)} KiB, served in ${served} ms, in the browser after ${Math.round(timing.domContentLoadedEventEnd)} ms`);
		assert.equal(await page.locator("h1").textContent(), "3 of 500 upstreams are down");
		assert.equal(await page.locator(".row:visible").count(), 3);
		assert.equal(await page.locator(".row").count(), 500);
		await accessible(page, "many", [[".fold > div"], [".quiet > div"]]); // 497 times the same takes long
		await shot(page, "many-desk", true);

		await page.locator("#q").fill(servers[250].address);
		assert.equal(await page.locator(".row:visible").count(), 1);
		await page.locator(".row:visible summary").first().click();
		await page.locator(".row:visible").getByText("modern (2026-07-28)").waitFor(); // it came when it was opened
		await page.locator("#q").fill("");
		assert.ok(await page.locator("#budget .brief").getByText("8 more, none burning faster").isVisible());
		await page.getByText("98 up").click();
		await eventually(async () => (await page.locator(".row:visible").count()) === 101, "the fold opens");
	});

	test("one more goes, and is seen", async () => {
		const page = await open(edge, { colorScheme: "dark" });
		await servers[499].stop();
		await page.getByText("4 of 500 upstreams are down").waitFor();
		await page.locator(".row.down", { hasText: servers[499].address }).waitFor();
	});
});

describe("one upstream, in public", () => {
	let edge, server;
	before(async () => {
		server = await new Server({ name: "internal-name" }).start();
		edge = await Edge.start([`mcp_proxy ${server.address}`], { status: "public on" });
		await edge.until((d) => d.counts.up === 1, "up");
	});
	after(async () => { await edge?.stop(); await server?.stop(); });

	test("strangers see that it is up, then down, and not where", async () => {
		const page = await open(edge, { size: "phone", reducedMotion: "reduce" });
		assert.equal(await page.locator("h1").textContent(), "The upstream is up");
		await accessible(page);
		await server.stop();
		await page.getByText("/mcp is down", { exact: true }).waitFor();
		await page.locator(".row.down", { hasText: "upstream 1" }).waitFor();
		assert.equal(await page.locator(".row > summary").evaluate((el) => { el.parentNode.classList.add("changed"); return getComputedStyle(el).animationName; }), "none");
		const content = await page.content();
		for (const secret of [String(server.port), "127.0.0.1", "internal-name"]) assert.ok(!content.includes(secret), secret);
		await shot(page, "public-phone", true);
	});
});
