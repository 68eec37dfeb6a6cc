package explain

import (
	"net/http"

	"github.com/mcphealth/mcphealth/docs"
	"github.com/mcphealth/mcphealth/mcphealth"
)

// why says why the conclusion of c from o is wrong, to somebody who is tired.
func why(c check, o outcome) string {
	if c.up(o) {
		return whyFalselyUp(o)
	}
	switch {
	case o.status == 0:
		return "It got no answer, where the probe got one. The server may be slow, or work on and off: run this again."
	case o.err != "" && o.media == "text/event-stream":
		return "The server answers by a stream, and to this question nothing came on it. To the probe's question something did."
	case o.status == http.StatusUnauthorized || o.login:
		return "The server asks for credentials. Somebody is there who reads requests and knows who may pass: that is a sign of life, not of an outage."
	case o.status == http.StatusForbidden:
		return "The server refuses this request, which only a running server can do."
	case o.status >= 500:
		return "The server cannot do this one thing, and says so. It does answer what MCP clients ask."
	case c.name == "get":
		return "A GET asks an MCP endpoint for an event stream, which it need not have. Without one it must refuse, by 405 or another 4xx, and works all the same."
	case o.rpc == "result":
		return "The status is not the one that this check wants, but the body is a JSON-RPC result: the server has answered."
	case o.code == -32601 && c.name == "ping":
		return "\"Method not found\" is an answer in the server's own protocol: it lives. Since 2026-07-28 there is no ping any more."
	case o.code == -32601:
		return "\"Method not found\" is an answer in the server's own protocol: it lives, and speaks another version than this check."
	case o.rpc == "error" && c.name == "initialize":
		return "The server refuses this handshake by a JSON-RPC error, so it lives. Servers of 2026-07-28 know no initialize; others allow only one."
	case o.rpc == "error" || o.media == "text/plain":
		return "The server wants something else first, such as a session or another protocol version. It says so in its own protocol: it lives."
	case o.status >= 300 && o.status < 400:
		return "The server sends this request elsewhere. The probe follows within the same server, and found it working."
	}
	return "A status alone says little about an MCP server. The probe asked in the server's own protocol, and was answered."
}

func whyFalselyUp(o outcome) string {
	switch {
	case o.media == "text/html":
		return "A web page comes with 200 as well: a login, a proxy's default page, a server of another kind. No MCP server answers with one."
	case o.media == "text/event-stream" && o.rpc == "":
		return "A stream was opened, but no answer comes on it. Clients would wait until they give up."
	case o.empty:
		return "The answer is empty. A proxy that knows no route, or has lost its server, answers so."
	case o.status >= 300 && o.status < 400:
		return "A redirect is no answer; whoever sent it need not know a thing about MCP."
	case o.rpc != "":
		return "It was answered, where the probe's questions were not all answered as clients need. The server works in part: see the probe's detail."
	}
	return "Anything that listens can answer with this status. Nothing in the answer comes from an MCP server."
}

// Words says what a reason means and what to do about it, as docs/verdicts.md does.
func Words(r mcphealth.Reason) (meaning, advice string) { return docs.Words(string(r)) }
