//go:build go1.21

package mcphealth

import (
	"bytes"
	"sync/atomic"
	"time"
)

const (
	// minErrors is how many errors within an interval are a burst: 10, so that a
	// client which calls a tool wrongly a few times degrades nothing.
	minErrors = 10
	// errorHold is for how many intervals a burst counts. A degraded upstream gets
	// no traffic by which it could prove itself, so it is tried again after that.
	errorHold = 2
)

// errorRate counts what JSON-RPC answers inside traffic say: a server may fail
// every call and answer each with HTTP 200. Atomics only.
type errorRate struct {
	since     atomic.Int64 // begin of the window, as Checker.clock says
	good, bad atomic.Int64 // answers in it
	until     atomic.Int64 // a burst counts until then
}

// add counts an answer that reports a failure, and reports whether more than the
// given share of at least minErrors answers within the window do.
func (e *errorRate) add(now int64, window time.Duration, share float64) bool {
	if now-e.since.Load() > int64(window) {
		e.since.Store(now)
		e.good.Store(0)
		e.bad.Store(0)
	}
	bad := e.bad.Add(1)
	all := bad + e.good.Load()
	if bad < minErrors || float64(bad) <= share*float64(all) {
		return false
	}
	e.until.Store(now + errorHold*int64(window))
	return true
}

func (e *errorRate) counts(now int64) bool { return now < e.until.Load() }

// Erred notes a JSON-RPC answer that reports an internal error or a failed tool
// call, which comes in place of Answered: the server lives. With a Schedule that
// sets an ErrorRate, a burst of them makes the upstream degraded, never down.
func (c *Checker) Erred(host string) {
	c.Answered(host)
	c.rate.good.Add(-1)
	if c.sched.ErrorRate > 0 && c.rate.add(c.clock(), c.sched.Interval, c.sched.ErrorRate) {
		c.bringForward(failure)
	}
}

// failureMarks are what an internal error and a failed tool call look like on the
// wire. Inside a string the quotes would be escaped, so they are members of objects.
var failureMarks = [][]byte{
	[]byte(`"isError":true`), []byte(`"isError": true`),
	[]byte(`"code":-32603`), []byte(`"code": -32603`),
}

// IsRPCFailure reports whether the first bytes of a JSON-RPC answer with status 200
// report an internal error or a failed tool call. It parses nothing, and misses what
// comes later: failures are short.
func IsRPCFailure(status int, contentType string, first []byte) bool {
	if !IsRPCAnswer(status, contentType, first) {
		return false
	}
	for i := 0; i < len(failureMarks); i++ {
		if bytes.Contains(first, failureMarks[i]) {
			return true
		}
	}
	return false
}
