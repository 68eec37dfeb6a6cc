// Package kit is what the small MCP servers of this repository have in common,
// whatever library speaks MCP for them: the work of their tools, counters that
// tests read at /debug/stats, a log of executions, a listener and a clean stop.
package kit

import (
	"context"
	"encoding/json"
	"fmt"
	"hash/maphash"
	"net/http"
	"os"
	"runtime"
	"sync"
	"time"
)

// maxSeen is how many different messages a server remembers to notice that one
// runs twice: 1 Mi hashes, about 40 MiB, an hour of 300 calls a second.
const maxSeen = 1 << 20

// progressEvery is the pause between two progress notifications of slow: short
// enough that a one-second call shows whether a proxy holds events back.
const progressEvery = 100 * time.Millisecond

// Stats counts what a server did. Its methods are the tools' work.
type Stats struct {
	Name     string
	Sessions func() int // live sessions on this side; nil means that there are none

	log  *os.File // one line per execution; nil = none
	seed maphash.Seed

	mu    sync.Mutex
	calls map[string]int
	seen  map[uint64]struct{} // hashes of messages
	dups  int
}

// NewStats opens the execution log, if it has a name, for appending: servers
// may share it, and it outlives a server that is killed, as counters do not.
func NewStats(name, log string) (*Stats, error) {
	s := &Stats{Name: name, seed: maphash.MakeSeed(), calls: map[string]int{}, seen: map[uint64]struct{}{}}
	if log == "" {
		return s, nil
	}
	var err error
	s.log, err = os.OpenFile(log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	return s, err
}

// Echo is the tool echo.
func (s *Stats) Echo(message string) string {
	s.ran("echo", message)
	return message
}

// Whoami is the tool whoami.
func (s *Stats) Whoami() string {
	s.ran("whoami", "")
	return fmt.Sprintf("%s, pid %d", s.Name, os.Getpid())
}

// Slow is the tool slow: it takes ms milliseconds and reports its progress
// (milliseconds done of all) meanwhile. It ends early when ctx does.
func (s *Stats) Slow(ctx context.Context, message string, ms int, progress func(done, all float64)) (string, error) {
	s.ran("slow", message)
	start, all := time.Now(), time.Duration(ms)*time.Millisecond
	for {
		left := all - time.Since(start)
		if left <= 0 {
			break
		}
		select {
		case <-time.After(min(left, progressEvery)):
		case <-ctx.Done():
			return "", ctx.Err()
		}
		progress(float64(time.Since(start).Milliseconds()), float64(ms))
	}
	if message != "" {
		return message, nil
	}
	return fmt.Sprintf("slept %d ms", ms), nil
}

// ran counts one execution. A message that ran before is a duplicate; a call
// without a message cannot be told from another one and is none.
func (s *Stats) ran(tool, message string) {
	if s.log != nil {
		fmt.Fprintf(s.log, "%s %s\n", tool, message)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls[tool]++
	if message == "" || s.seen == nil {
		return
	}
	h := maphash.String(s.seed, message)
	if _, again := s.seen[h]; again {
		s.dups++
	}
	s.seen[h] = struct{}{}
	if len(s.seen) > maxSeen {
		s.seen, s.dups = nil, -1 // says that it no longer knows, rather than 0
	}
}

// ServeHTTP answers GET /debug/stats.
func (s *Stats) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	sessions := 0
	if s.Sessions != nil {
		sessions = s.Sessions()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	json.NewEncoder(w).Encode(map[string]any{
		"name": s.Name, "pid": os.Getpid(), "sessions": sessions, "goroutines": runtime.NumGoroutine(),
		"calls": s.calls, "duplicates": s.dups,
	})
}
