# Your MCP server, which Docker asks whether it lives. An unknown is no failure: it
# must not have a container restarted.
FROM my-mcp-server
COPY --from=mcphealth /mcphealth /usr/local/bin/mcphealth
HEALTHCHECK --interval=10s --timeout=6s --start-period=30s --retries=2 \
	CMD ["mcphealth", "probe", "--healthcheck", "http://127.0.0.1:8000/mcp"]
