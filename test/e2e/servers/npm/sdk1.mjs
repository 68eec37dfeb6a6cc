// @modelcontextprotocol/sdk 1.x, wired as its own examples are:
// simpleStreamableHttp (--mode stateful) and simpleStatelessStreamableHttp.
import { randomUUID } from 'node:crypto';
import { createMcpExpressApp } from '@modelcontextprotocol/sdk/server/express.js';
import { McpServer } from '@modelcontextprotocol/sdk/server/mcp.js';
import { StreamableHTTPServerTransport } from '@modelcontextprotocol/sdk/server/streamableHttp.js';
import { isInitializeRequest } from '@modelcontextprotocol/sdk/types.js';
import { addTools, mode, serve } from './kit.mjs';

const app = createMcpExpressApp();
const sessions = new Map(); // id → transport

function newServer() {
  const server = new McpServer({ name: 'sdk1', version: '1.32.2' });
  addTools(server, extra => ({ send: extra.sendNotification, token: extra._meta?.progressToken }));
  return server;
}

const refuse = (res, status, code, message) => res.status(status).json({ jsonrpc: '2.0', error: { code, message }, id: null });

async function open(req, res) {
  const transport = new StreamableHTTPServerTransport({
    sessionIdGenerator: () => randomUUID(),
    onsessioninitialized: id => sessions.set(id, transport)
  });
  transport.onclose = () => sessions.delete(transport.sessionId);
  await newServer().connect(transport);
  await transport.handleRequest(req, res, req.body);
}

async function stateful(req, res) {
  const id = req.headers['mcp-session-id'];
  if (id && sessions.has(id)) return sessions.get(id).handleRequest(req, res, req.body);
  if (!id && req.method === 'POST' && isInitializeRequest(req.body)) return open(req, res);
  if (id) return refuse(res, 404, -32001, 'Session not found');
  refuse(res, 400, -32000, 'Bad Request: No valid session ID provided');
}

async function stateless(req, res) {
  if (req.method !== 'POST') return refuse(res, 405, -32000, 'Method not allowed.');
  const server = newServer();
  const transport = new StreamableHTTPServerTransport({ sessionIdGenerator: undefined });
  await server.connect(transport);
  res.on('close', () => {
    transport.close();
    server.close();
  });
  await transport.handleRequest(req, res, req.body);
}

app.all('/mcp', mode === 'stateful' ? stateful : stateless);
serve(app, () => sessions.size);
