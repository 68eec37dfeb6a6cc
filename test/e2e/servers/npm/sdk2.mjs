// @modelcontextprotocol/server 2.x as its serving guide says: createMcpHandler
// speaks 2026-07-28, and 2025 without sessions (dual).
import { createMcpExpressApp } from '@modelcontextprotocol/express';
import { toNodeHandler } from '@modelcontextprotocol/node';
import { createMcpHandler, McpServer } from '@modelcontextprotocol/server';
import { addTools, serve } from './kit.mjs';

const app = createMcpExpressApp();
const handle = toNodeHandler(
  createMcpHandler(() => {
    const server = new McpServer({ name: 'sdk2', version: '2.4.0' });
    addTools(server, ctx => ({ send: ctx.mcpReq.notify, token: ctx.mcpReq._meta?.progressToken }));
    return server;
  })
);

app.all('/mcp', (req, res) => handle(req, res, req.body));
serve(app);
