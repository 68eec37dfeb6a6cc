// What the servers here have in common: the work of the tools echo, whoami and
// slow, the counters at /debug/stats, the listener. The same as
// examples/servers/kit, in JavaScript.
import { appendFileSync } from 'node:fs';
import { setTimeout as sleep } from 'node:timers/promises';
import * as z from 'zod/v4';

const args = process.argv.slice(2);
const flag = (name, missing) => (args.includes(name) ? args[args.indexOf(name) + 1] : missing);

export const mode = flag('--mode', 'stateless');
const name = flag('--name', 'demo');
const [host, port] = flag('--listen', '127.0.0.1:9001').split(':');
const log = flag('--log');

const calls = {};
const seen = new Set();
let duplicates = 0;

// A message that ran before is a duplicate; a call without one cannot be told
// from another and is none.
function ran(tool, message = '') {
  if (log) appendFileSync(log, `${tool} ${message}\n`);
  calls[tool] = (calls[tool] ?? 0) + 1;
  if (message === '') return;
  if (seen.has(message)) duplicates++;
  seen.add(message);
}

const text = s => ({ content: [{ type: 'text', text: s }] });

// addTools registers the tools on an McpServer of SDK 1 or 2. notify finds, in
// the last argument of a tool callback, the function that sends a notification
// to its caller, and the progress token if there is one.
export function addTools(server, notify) {
  server.registerTool('echo', { description: 'sends a message back', inputSchema: z.object({ message: z.string() }) }, async ({ message }) => {
    ran('echo', message);
    return text(message);
  });
  server.registerTool('whoami', { description: 'tells which server answers' }, async () => {
    ran('whoami');
    return text(`${name}, pid ${process.pid}`);
  });
  const slowArgs = z.object({ ms: z.number(), message: z.string().optional() });
  server.registerTool('slow', { description: 'takes a while and reports progress', inputSchema: slowArgs }, async ({ ms, message }, extra) => {
    ran('slow', message);
    const { send, token } = notify(extra);
    const start = Date.now();
    for (let left = ms; left > 0; left = ms - (Date.now() - start)) {
      await sleep(Math.min(left, 100));
      if (token !== undefined) {
        await send({ method: 'notifications/progress', params: { progressToken: token, progress: Date.now() - start, total: ms } });
      }
    }
    return text(message ?? `slept ${ms} ms`);
  });
}

// serve adds the counters to an express app and listens.
export function serve(app, sessions = () => 0) {
  app.get('/debug/stats', (_, res) => {
    res.json({ name, pid: process.pid, sessions: sessions(), calls, duplicates });
  });
  const server = app.listen(Number(port), host, () => console.log(`${name}: http://${host}:${port}/mcp`));
  process.on('SIGTERM', () => {
    server.close(() => process.exit(0)); // waits for running calls …
    server.closeIdleConnections();
    setTimeout(() => process.exit(0), 2000).unref(); // … but not for endless streams
  });
}
