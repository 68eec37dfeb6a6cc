// A real client (TypeScript SDK 1.x): calls echo four times and prints how each
// call ended. Call 2 waits for a line on standard input.
import { Client } from '@modelcontextprotocol/sdk/client/index.js';
import { StreamableHTTPClientTransport } from '@modelcontextprotocol/sdk/client/streamableHttp.js';
import { createInterface } from 'node:readline';

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const client = new Client({ name: 'mcphealth-e2e', version: '0' });
await client.connect(new StreamableHTTPClientTransport(new URL(process.env.MCP_URL)));
for (let call = 1; call <= 4; call++) {
  if (call > 1) await lines.next();
  try {
    const r = await client.callTool({ name: 'echo', arguments: { message: `call ${call}` } });
    console.log(r.isError ? `call ${call}: isError` : `call ${call}: ok`);
  } catch (e) {
    console.log(`call ${call}: ${e.message}`.replaceAll('\n', ' '));
  }
}
process.exit(0);
