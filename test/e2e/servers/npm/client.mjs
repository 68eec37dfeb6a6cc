// A client of the legacy era as an application uses it: reads commands, a line each,
// and answers each with a line of JSON.
//
//	open           opens a session
//	call MESSAGE   calls echo
//	whoami         says which replica answers
//	close
//	many N M       N sessions of M calls of whoami, 20 at a time
//	work N         N clients begin to call echo over and over: after a 404 they open a
//	               new session, after anything else they try again
//	stop           ends that, once each has had one more answer, or 30 s of none
//
// usage: node client.mjs sdk1|sdk2 URL
import { createInterface } from 'node:readline';

const [lib, url] = process.argv.slice(2);
const from = {
  sdk1: ['@modelcontextprotocol/sdk/client/index.js', '@modelcontextprotocol/sdk/client/streamableHttp.js'],
  sdk2: ['@modelcontextprotocol/client', '@modelcontextprotocol/client']
}[lib];
const [{ Client }, { StreamableHTTPClientTransport }] = await Promise.all(from.map(m => import(m)));

async function open() {
  const client = new Client({ name: lib, version: '0' });
  const transport = new StreamableHTTPClientTransport(new URL(url));
  await client.connect(transport);
  return { client, transport };
}

const call = async (s, name, args = {}) => (await s.client.callTool({ name, arguments: args })).content[0].text;

async function close(s) {
  await s.transport.terminateSession?.();
  await s.client.close();
}

async function many(sessions, calls) {
  const tally = { whole: 0, calls: 0, owners: {}, errors: {} };
  const one = async () => {
    let owner, s;
    try {
      s = await open();
      for (let i = 0; i < calls; i++) {
        const who = (await call(s, 'whoami')).split(',')[0];
        tally.calls++;
        if (who !== (owner ??= who)) throw new Error('answered by another replica');
      }
      tally.whole++;
      tally.owners[owner] = (tally.owners[owner] ?? 0) + 1;
    } catch (e) {
      const kind = `${e.code ?? e.name}: ${e.message}`.slice(0, 100);
      tally.errors[kind] = (tally.errors[kind] ?? 0) + 1;
    }
    if (s) await close(s).catch(() => {});
  };
  let left = sessions;
  await Promise.all(Array.from({ length: 20 }, async () => {
    while (left-- > 0) await one();
  }));
  return tally;
}

let stopped = Infinity; // when the work was told to stop
let working;

async function work(clients) {
  const tally = { calls: 0, reopened: 0, longest: 0, lost: 0, errors: {} };
  const one = async w => {
    let s;
    let last = Date.now();
    for (let n = 0, done = false; !done; n++) {
      const start = Date.now();
      try {
        s ??= await open();
        await call(s, 'echo', { message: `${lib}-w${w}-${n}` });
        tally.calls++;
        tally.longest = Math.max(tally.longest, Date.now() - last);
        last = Date.now();
        done = start > stopped;
      } catch (e) {
        const kind = `${e.code ?? e.name}: ${e.message}`.replace(/"id":[^,}]*/g, '"id":…').slice(0, 160);
        tally.errors[kind] = (tally.errors[kind] ?? 0) + 1;
        if (s && /Session not found/.test(e.message)) {
          tally.reopened++;
          await s.client.close().catch(() => {});
          s = undefined;
        }
        if (start > stopped + 30_000) {
          tally.lost++;
          done = true;
        }
      }
      await new Promise(go => setTimeout(go, 50));
    }
    if (s) await close(s).catch(() => {});
  };
  await Promise.all(Array.from({ length: clients }, (_, w) => one(w)));
  return tally;
}

let session;
const commands = {
  open: async () => void (session = await open()),
  call: async message => call(session, 'echo', { message }),
  whoami: async () => (await call(session, 'whoami')).split(',')[0],
  close: async () => close(session),
  many: async (n, m) => many(Number(n), Number(m)),
  work: async n => void (working = work(Number(n))),
  stop: async () => {
    stopped = Date.now();
    return working;
  }
};
for await (const line of createInterface({ input: process.stdin })) {
  const [name, ...args] = line.trim().split(' ');
  const start = Date.now();
  const answer = {};
  try {
    answer.result = (await commands[name](...args)) ?? 'ok';
  } catch (e) {
    answer.error = `${e.name} ${e.code ?? ''} ${e.message}`.replace(/\s+/g, ' ').slice(0, 300);
  }
  console.log(JSON.stringify({ ...answer, ms: Date.now() - start }));
}
process.exit(0);
