package main

// fact is what a reader, and the tests, should know of one capture.
type fact struct {
	name string // of the JSON file, and of the txtar file with / as -
	of   string // the JSON file, where its name is another
	only string // the exchanges to keep, where they are not the usual ones
	// want is what a prober must conclude by docs/verdicts.md: verdict, reason and
	// era; with "; option: " in front where it depends on how it is set up (see
	// captures_test.go).
	want string
	why  string
}

const (
	stateful = "A session router: it refuses the ghost session before it creates anything. One initialize, held, shows that the server behind it works."
	noRouter = "No sessions: a ping with a ghost session is answered, so nothing is ever opened here."
	dual     = "Answers server/discover whatever session the request claims: a modern server, asked the same each time."
	pageFor  = "A gateway's own answer for an upstream that it does not reach. The server may live; through this way it serves nobody."
	nothing  = "404 or 405 on every rung, without a word of MCP, where MCP was never seen: a wrong path, or an HTTP+SSE server. That proves nothing; where MCP did answer before, the same is route_absent."
)

var facts = []fact{
	// Real servers.
	{name: "fastmcp-4.20.16-stateful", want: "ready ok legacy; shallow: alive rpc_error legacy",
		why: "Refuses the modern version in words of its own, then the ghost session. Initialize took 1.03 s. The stream opens with a priming event: an id and empty data."},
	{name: "fastmcp-4.20.16-stateless", want: "ready ok legacy", why: noRouter},
	{name: "go-sdk-v1.2.0-json", want: "ready ok legacy; shallow: alive session_required legacy", why: stateful + " The refusal is plain text, not JSON-RPC."},
	{name: "go-sdk-v1.2.0-stateful", want: "ready ok legacy; shallow: alive session_required legacy", why: stateful + " The refusal is plain text, not JSON-RPC."},
	{name: "go-sdk-v1.2.0-stateless", want: "ready ok legacy", why: noRouter + " Initialize would hand out a session id all the same."},
	{name: "go-sdk-v1.8.0-auth", want: "alive auth_required unknown; bad-token: degraded credentials_rejected unknown; token: ready ok legacy",
		why: "401 with a challenge is the authorization in front of an MCP server: alive, as long as we send no credentials. With a good token the DiscoverResult lists legacy versions only, so initialize is asked."},
	{name: "go-sdk-v1.8.0-json", want: "ready ok legacy; shallow: alive session_required legacy", why: stateful + " Without the ghost it would answer discover with a list of legacy versions."},
	{name: "go-sdk-v1.8.0-stateful", want: "ready ok legacy; shallow: alive session_required legacy", why: stateful + " Without the ghost it would answer discover with a list of legacy versions."},
	{name: "go-sdk-v1.8.0-stateless-json", want: "ready ok modern", why: dual},
	{name: "go-sdk-v1.8.0-stateless", want: "ready ok modern", why: dual},
	{name: "hono-mcp-0.3.2", want: "ready ok legacy", why: noRouter + " One transport for all clients: a DELETE without a session would end it for everybody, a small id would take somebody's answer."},
	{name: "mcp-framework-0.2.22", want: "ready ok legacy; shallow: alive session_required legacy", why: stateful + " The refusal is JSON-RPC without a Content-Type."},
	{name: "mcp-go-v0.56.0-default", want: "ready ok legacy; shallow: alive session_required legacy", why: stateful + " Plain text 404: by content not a proxy's."},
	{name: "mcp-go-v0.56.0-stateful", want: "ready ok legacy; shallow: alive session_required legacy", why: stateful + " Plain text 404: by content not a proxy's."},
	{name: "mcp-go-v0.56.0-stateless", want: "ready ok legacy", why: noRouter + " Discover is -32601 in HTTP 200: weak proof, so ping is asked."},
	{name: "mcp-go-v1.2.1-default", want: "ready ok modern", why: dual + " It has legacy sessions besides; a modern question needs none."},
	{name: "mcp-go-v1.2.1-stateful", want: "ready ok modern", why: dual + " It has legacy sessions besides; a modern question needs none."},
	{name: "mcp-go-v1.2.1-stateless", want: "ready ok modern", why: dual},
	{name: "mcp-lite-0.10.0-stateful", want: "ready ok legacy; shallow: alive rpc_error legacy",
		why: "Refuses an unknown version with -32602, the code of a malformed modern request: codes prove no era. Negotiates 2025-03-26, which every later request must carry."},
	{name: "mcp-lite-0.10.0-stateless", want: "ready ok legacy",
		why: "Ping works only without a version header (the recorder's ghost ping, f, carried one): before a version is negotiated none is sent."},
	{name: "mcp-proxy-6.7.19-default", want: "ready ok modern", why: dual + " The tools list is cut."},
	{name: "playwright-mcp-0.0.83-by-ip", want: "unknown host_guessed unknown; host: dead host_rejected unknown",
		why: "Serves one Host only. While we merely guess the Host that clients use, its refusal says nothing; where it is configured, clients get the same 403."},
	{name: "playwright-mcp-0.0.83", want: "ready ok legacy; shallow: alive session_required legacy", why: stateful + " The refusal is plain text without a Content-Type. The tools list is cut."},
	{name: "server-everything-2026.8.31-sse", want: "unknown endpoint_not_found unknown; sse: degraded handshake_failed sse",
		why: "HTTP+SSE of 2024-11-05: every POST to the endpoint is 404, only GET would tell, and a GET opens an endless stream elsewhere: so it is asked where `era sse` is configured only. The recorder did not post to the message address, hence handshake_failed here and not ready."},
	{name: "server-everything-2026.8.31-streamableHttp", want: "ready ok legacy; shallow: alive session_required legacy", why: stateful + " The refusal has no id member at all. The tools list is cut."},
	{name: "supergateway-4.0.0-stateful", want: "ready ok legacy; shallow: alive session_required legacy",
		why: "A bridge to stdio. 404 with -32601 looks like a modern server that lacks a method, but its child is legacy; the ghost ping is refused by the router and spawns nothing. Discover took 3.2 s, initialize 1.2 s; replayed without delay."},
	{name: "supergateway-4.0.0-stateless", want: "ready ok legacy",
		why: "A bridge to stdio that spawns a child for every request (0.6 to 3 s; replayed without delay). A notification precedes the answer in the stream."},
	{name: "tmcp-1.20.0", want: "ready ok modern", why: dual + " A sessionless legacy ping would be given a session: never asked."},
	{name: "ts-sdk-v1.10.2-stateful", want: "ready ok legacy; shallow: alive session_required legacy", why: stateful + " Negotiates 2024-11-05. After DELETE its map still holds the session, and a ping in it hangs: nothing is asked after DELETE."},
	{name: "ts-sdk-v1.10.2-stateless", want: "ready ok legacy", why: noRouter + " A stream that carried an error never ends: reading stops at the message with our id."},
	{name: "ts-sdk-v1.17.5-stateful", want: "ready ok legacy; shallow: alive session_required legacy", why: stateful + " Negotiates 2025-06-18; DELETE with another version would be 400 and leave the session."},
	{name: "ts-sdk-v1.17.5-stateless", want: "ready ok legacy",
		why: "Ping works only without a version header (the recorder's ghost ping, f, carried one): before a version is negotiated none is sent."},
	{name: "ts-sdk-v1.24.3-stateful", want: "ready ok legacy; shallow: alive session_required legacy", why: stateful},
	{name: "ts-sdk-v1.24.3-stateless", want: "ready ok legacy", why: noRouter},
	{name: "ts-sdk-v1.32.2-example-json", want: "ready ok legacy; shallow: alive session_required legacy", why: stateful + " It has no route for DELETE (404 HTML): the session stays, which is the server's business."},
	{name: "ts-sdk-v1.32.2-example-simpleStreamableHttp", want: "ready ok legacy; shallow: alive session_required legacy", why: stateful + " At 1000 sessions it turns real clients away: one is held, none is left. The tools list is cut."},
	{name: "ts-sdk-v1.32.2-example-sse-and-streamable", want: "ready ok legacy; shallow: alive session_required legacy", why: stateful},
	{name: "ts-sdk-v1.32.2-example-sse-only", want: "unknown endpoint_not_found unknown; sse: degraded handshake_failed sse",
		why: "HTTP+SSE of 2024-11-05: every POST to the endpoint is 404, only GET would tell. The recorder did not post to the message address, hence handshake_failed here and not ready."},
	{name: "ts-sdk-v1.32.2-example-stateless", want: "ready ok legacy", why: noRouter},
	{name: "ts-sdk-v1.32.2-single", only: "a2 d2 e1 e3 e4 e7", want: "alive session_required legacy",
		why: "One transport for the whole process, recorded before any client came: \"Server not initialized\". Our initialize would take the only session from the clients, and our DELETE would brick the server, so it is left alone: alive. The exchanges after DELETE are in -after-delete."},
	{name: "ts-sdk-v1.32.2-single-after-delete", of: "ts-sdk-v1.32.2-single", only: "e8 f f7 q10", want: "dead route_absent unknown",
		why: "The same process after its only session was ended: 404 with a JSON-RPC error to everything, also to an initialize that carries no session. It answers, and serves nobody until it is restarted."},
	{name: "ts-sdk-v1.32.2-stateful-json", want: "ready ok legacy; shallow: alive session_required legacy", why: stateful},
	{name: "ts-sdk-v1.32.2-stateful", want: "ready ok legacy; shallow: alive session_required legacy", why: stateful},
	{name: "ts-sdk-v1.32.2-stateless", want: "ready ok legacy", why: noRouter},
	{name: "ts-sdk-v2.4.0-bare-stateful", only: "a2 d2 e1 e3 e4 e7", want: "alive session_required legacy",
		why: "One transport for the whole process, recorded before any client came. It is left alone, as ts-sdk-v1.32.2-single is."},
	{name: "ts-sdk-v2.4.0-bare-stateful-after-delete", of: "ts-sdk-v2.4.0-bare-stateful", only: "e8 f f7 q10", want: "dead route_absent unknown",
		why: "The same process after its only session was ended: it serves nobody until it is restarted."},
	{name: "ts-sdk-v2.4.0-dual-sse", want: "ready ok modern", why: dual},
	{name: "ts-sdk-v2.4.0-dual", want: "ready ok modern", why: dual + " It lists 2026-07-28 only, though initialize works too: the list is not exhaustive."},
	{name: "ts-sdk-v2.4.0-stateful", want: "ready ok legacy; shallow: alive session_required legacy", why: stateful},
	{name: "ts-sdk-v2.4.0-strict", want: "ready ok modern", why: dual + " Everything legacy is -32022 here."},

	// Things that are no MCP server.
	{name: "not-mcp/basic-401", want: "alive auth_required unknown; bad-token: degraded credentials_rejected unknown",
		why: "401 speaks first, whatever its body: authorization stands in front, and what it guards cannot be seen without credentials. A dead verdict would take every protected server out."},
	{name: "not-mcp/caddy-200-empty", want: "dead not_mcp unknown; any: alive http_answer unknown", why: "Caddy's answer where no route matches: 200 and nothing. The trap of every \"200 is healthy\" check."},
	{name: "not-mcp/caddy-404", want: "unknown endpoint_not_found unknown; any: alive http_answer unknown", why: nothing},
	{name: "not-mcp/caddy-502", want: "dead gateway_error unknown; any: alive http_answer unknown", why: pageFor},
	{name: "not-mcp/caddy-503", want: "dead gateway_error unknown", why: pageFor},
	{name: "not-mcp/close", want: "dead reset unknown; any: dead reset unknown", why: "Accepts, reads, and hangs up without an answer: no answer is none under either rule of life."},
	{name: "not-mcp/cloudflare-521", want: "dead gateway_error unknown", why: pageFor},
	{name: "not-mcp/crash-500", want: "dead server_error unknown", why: "500 in plain text on every rung: no JSON-RPC layer answers, the application before it crashed. A 500 to discover alone would not do: some servers choke on unknown methods."},
	{name: "not-mcp/echo", want: "dead not_mcp unknown", why: "Sends our request back: it has our id, but a method and no result."},
	{name: "not-mcp/envoy-503", want: "dead gateway_error unknown", why: pageFor},
	{name: "not-mcp/fastapi-404", want: "unknown endpoint_not_found unknown", why: nothing},
	{name: "not-mcp/fastapi-405", want: "unknown endpoint_not_found unknown", why: nothing},
	{name: "not-mcp/graphql-400", want: "dead not_mcp unknown", why: "A bare 400 in foreign JSON, on every rung: what answers here speaks another protocol."},
	{name: "not-mcp/hang", want: "dead timeout unknown; any: dead timeout unknown", why: "Accepts, and never says a word."},
	{name: "not-mcp/haproxy-503-dead", want: "dead gateway_error unknown", why: pageFor},
	{name: "not-mcp/haproxy-503-nobackend", want: "dead gateway_error unknown", why: pageFor},
	{name: "not-mcp/haproxy-503-none", want: "dead gateway_error unknown", why: pageFor},
	{name: "not-mcp/httpbin", want: "dead not_mcp unknown", why: "200 and JSON, in which even our words and our id stand, but as a string in another document."},
	{name: "not-mcp/jsonrpc-not-mcp", want: "alive method_not_found unknown", why: "JSON-RPC to our id, and -32601 to everything, initialize included. A chain node says that; so does a server that was built around one tool and speaks nothing else. Weak proof, but an answer of the right protocol: it stays alive."},
	{name: "not-mcp/jsonrpc-wrong-id", want: "dead not_mcp unknown", why: "A perfect JSON-RPC result, with another id: it is not the answer to our question (a cache, a stub)."},
	{name: "not-mcp/login-200", want: "dead not_mcp unknown", why: "A login page in HTTP 200. A client would get it too."},
	{name: "not-mcp/login-302", want: "unknown redirected unknown", why: "A redirect to a login page is not followed: it would ask another question elsewhere. The Location is in the detail."},
	{name: "not-mcp/maintenance-503", want: "dead gateway_error unknown", why: "503 without JSON-RPC is a gateway's, Retry-After or not: the clients of this way are served by nobody."},
	{name: "not-mcp/nginx-301", want: "unknown redirected unknown", why: "A 301 would turn our POST into a GET; the operator should configure the final path, which the detail names."},
	{name: "not-mcp/nginx-404", want: "unknown endpoint_not_found unknown", why: nothing},
	{name: "not-mcp/nginx-502", want: "dead gateway_error unknown", why: pageFor},
	{name: "not-mcp/nginx-503", want: "dead gateway_error unknown", why: pageFor},
	{name: "not-mcp/nginx-504", want: "dead gateway_error unknown", why: pageFor},
	{name: "not-mcp/nginx-static-405", want: "unknown endpoint_not_found unknown", why: nothing},
	{name: "not-mcp/ok-empty", want: "dead not_mcp unknown", why: "200 and nothing."},
	{name: "not-mcp/ok-json", want: "dead not_mcp unknown", why: "A health endpoint's JSON: healthy, but no MCP endpoint."},
	{name: "not-mcp/ok-text", want: "dead not_mcp unknown", why: "200 OK says \"OK\"."},
	{name: "not-mcp/rate-429", want: "degraded rate_limited unknown", why: "429 speaks first, whatever its body: something lives there and wants to be asked less often. Asking on would make it worse."},
	{name: "not-mcp/spring-404", want: "unknown endpoint_not_found unknown", why: nothing},
	{name: "not-mcp/sse-silent", want: "dead stalled unknown", why: "Headers and comments, and never a message: the front of the server works, what should answer does not."},
	{name: "not-mcp/traefik-404", want: "unknown endpoint_not_found unknown", why: nothing},
	{name: "not-mcp/traefik-502", want: "dead gateway_error unknown", why: pageFor},
	{name: "not-mcp/traefik-503", want: "dead gateway_error unknown", why: pageFor},
	{name: "not-mcp/truncated", want: "dead not_mcp unknown", why: "The answer ends before its Content-Length: what was cut cannot be believed, and a client would not either."},
}
