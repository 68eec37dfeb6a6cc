"use strict";
// Keeps the page up to date. Without it the page says the same, as of when it was made.
(() => {
	const $ = (id) => document.getElementById(id);
	const root = document.documentElement;
	root.classList.add("js");

	// The server's clock: what "3 min ago" is counted by.
	let skew = Date.parse(document.body.dataset.at) - Date.now();
	const now = () => Date.now() + skew;

	const span = (s) =>
		s < 60 ? `${s} s` : s < 3600 ? `${Math.floor(s / 60)} min`
		: s < 172800 ? `${Math.floor(s / 3600)} h ${Math.floor(s / 60) % 60} min`
		: `${Math.floor(s / 86400)} d ${Math.floor(s / 3600) % 24} h`;
	const words = {
		for: (s) => span(Math.max(0, Math.floor(s))),
		ago: (s) => words.for(s) + " ago",
		due: (s) => (s <= -1 ? "in " + span(Math.floor(-s)) : "now"),
	};
	const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });
	const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
	const text = (el, s) => { if (el.textContent !== s) el.textContent = s; };

	// Times of the visitor's own zone; the title has UTC.
	function localize(within) {
		const today = new Date(now()).toDateString();
		for (const el of within.querySelectorAll("time.at")) {
			const t = new Date(el.dateTime);
			text(el, (t.toDateString() === today ? clock : day).format(t));
			el.title = el.dateTime;
		}
	}
	function count(within = document) {
		for (const kind in words) {
			for (const el of within.querySelectorAll("time." + kind)) text(el, words[kind]((now() - Date.parse(el.dateTime)) / 1000));
		}
	}

	// What is opened and what is filtered is the visitor's, not the server's.
	const own = new Set(["open", "hidden"]);
	const make = (html) => {
		const t = document.createElement("template");
		t.innerHTML = html;
		return t.content.firstElementChild;
	};
	function patch(old, to) {
		if (old.isEqualNode(to)) return;
		if (old.nodeName !== to.nodeName) return old.replaceWith(to);
		if (old.nodeType !== Node.ELEMENT_NODE) { old.data = to.data; return; }
		for (const { name } of [...old.attributes]) if (!own.has(name) && !to.hasAttribute(name)) old.removeAttribute(name);
		for (const { name, value } of to.attributes) if (!own.has(name) && old.getAttribute(name) !== value) old.setAttribute(name, value);
		if (old.hasAttribute("data-keep")) return;
		const have = [...old.childNodes], want = [...to.childNodes];
		want.forEach((n, i) => (have[i] ? patch(have[i], n) : old.append(n)));
		have.slice(want.length).forEach((n) => n.remove());
	}
	function update(id, html) {
		const old = $(id), to = make(html);
		if (!old) return;
		const selection = getSelection();
		if (!selection.isCollapsed && old.contains(selection.anchorNode)) return; // somebody copies from it
		const moved = old.matches(".row") && old.className.split(" ")[1] !== to.className.split(" ")[1];
		if (old.open && "brief" in to.dataset) return void complete(old).catch(() => {});
		patch(old, to);
		for (const few of old.querySelectorAll(".few")) few.open = true; // they have nothing to open them by
		if (moved && (to.open || !old.contains(document.activeElement))) old.open = to.open;
		localize(old);
	}
	// complete gets the rest of a row that is brief, once it is opened.
	async function complete(row) {
		const answer = await fetch(location.pathname + "?row=" + encodeURIComponent(row.id), { headers: { Accept: "text/html" } });
		const html = answer.ok ? await answer.text() : "";
		if (html && row.isConnected) { patch(row, make(html)); localize(row); count(row); }
	}
	document.addEventListener("toggle", (e) => {
		if (e.target.open && "brief" in e.target.dataset) complete(e.target).catch(() => {}); // the link in it is left
	}, true);
	function arrange(order, parts) {
		const focused = document.activeElement, kept = new Set();
		const outer = ["top", "pools", "more", "calm", "aside"];
		for (const id of [...outer, ...Object.keys(order).filter((id) => !outer.includes(id))]) {
			const container = $(id);
			if (!container) continue;
			(order[id] || []).forEach((child, i) => {
				kept.add(child);
				let el = $(child);
				if (!el && parts[child]) { el = make(parts[child]); localize(el); }
				if (el && container.children[i] !== el) container.insertBefore(el, container.children[i] || null);
			});
		}
		for (const el of document.querySelectorAll("[data-piece]")) if (!kept.has(el.id)) el.remove();
		if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true });
	}

	// The filter.
	const q = $("q"), show = $("show"), unfolded = new Set(); // folds that it opened
	function filter() {
		const want = q.value.trim().toLowerCase(), problems = show.checked, on = want !== "" || problems;
		let found = 0, all = 0;
		for (const row of document.querySelectorAll(".row")) {
			all++;
			row.hidden = (problems && "calm" in row.dataset) || !row.dataset.line.includes(want);
			if (!row.hidden) found++;
		}
		for (const pool of document.querySelectorAll(".pool")) pool.hidden = on && !pool.querySelector(".row:not([hidden])");
		text($("found"), on ? `${found} of ${all}` : "");
	}
	function filtered() {
		filter();
		for (const el of document.querySelectorAll(".fold, .quiet")) {
			if (q.value.trim() && !el.open) { el.open = true; unfolded.add(el); }
			if (!q.value.trim() && unfolded.delete(el)) el.open = false;
		}
		const query = new URLSearchParams();
		if (q.value.trim()) query.set("q", q.value.trim());
		if (show.checked) query.set("show", "problems");
		history.replaceState(null, "", query.size ? "?" + query : location.pathname);
	}
	q.addEventListener("input", filtered);
	show.addEventListener("change", filtered);
	q.form.addEventListener("submit", (e) => { e.preventDefault(); filtered(); });

	// The stream. A page that is not live says so: old good news is worse than none.
	let stream, heard = Date.now(), tried = 0, live = false, title = document.title;
	function alive(on, at) {
		live = on;
		if (on) {
			heard = Date.now();
			if (at) {
				skew = at - heard;
				$("asof").dateTime = new Date(at).toISOString();
				localize($("asof").parentNode);
			}
		}
		$("live").classList.toggle("on", on);
		text($("live"), on ? "Live" : "Not live");
		const stale = !on && Date.now() - heard > 5000;
		$("stale").hidden = !stale;
		if (stale) text($("stale"), `Not live: this is how it was at ${$("asof").textContent}. Trying to reach the server.`);
		document.title = stale ? "… " + title : title;
	}
	function connect() {
		if (stream) stream.close();
		tried = Date.now();
		stream = new EventSource(location.pathname + "?since=" + Date.parse(document.body.dataset.at));
		stream.addEventListener("error", () => alive(false));
		stream.addEventListener("beat", (e) => alive(true, JSON.parse(e.data).at));
		stream.addEventListener("render", (e) => {
			const r = JSON.parse(e.data);
			for (const id in r.parts) update(id, r.parts[id]);
			if (r.order) arrange(r.order, r.parts);
			title = r.title;
			if ($("icon").href !== r.icon) $("icon").href = r.icon;
			alive(true, r.at);
			count();
			filter();
		});
		let changes = [], later = 0;
		stream.addEventListener("change", (e) => {
			changes.push(JSON.parse(e.data));
			clearTimeout(later);
			later = setTimeout(() => { tell(changes); changes = []; }, 300);
		});
	}
	function tell(changes) {
		for (const c of changes) for (const row of document.querySelectorAll(`[id$="-${CSS.escape(c.id)}"].row`)) {
			row.classList.remove("changed");
			void row.offsetWidth; // begin anew
			row.classList.add("changed");
		}
		const sentence = (c) => `${c.upstream} ${c.path} is ${c.to}: ${c.reason}.`;
		$("say").textContent = changes.length > 3 ? `${changes.length} changes. ${$("overview").querySelector("h1").textContent}.` : changes.map(sentence).join(" ");
	}
	setInterval(() => {
		count();
		const silent = Date.now() - Math.max(heard, tried);
		if (silent > 30000) live = false;
		if (!live) alive(false);
		if (silent > 30000 || stream.readyState === EventSource.CLOSED && silent > 10000) connect();
	}, 5000);

	text($("zone"), `Times are ${Intl.DateTimeFormat().resolvedOptions().timeZone}; point at one for UTC.`);
	localize(document);
	filter();
	connect();
})();
