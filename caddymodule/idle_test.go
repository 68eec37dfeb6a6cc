//go:build linux

package caddymodule

import (
	"io"
	"net"
	"runtime"
	"sync/atomic"
	"testing"
	"time"
)

// pairs dials n connections to a listener and returns both ends.
func pairs(t *testing.T, n int) (ours, theirs []net.Conn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	for range n {
		c, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		s, err := ln.Accept()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close(); s.Close() })
		ours, theirs = append(ours, c), append(theirs, s)
	}
	return ours, theirs
}

func within(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Second); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 5 s: %s", what)
		}
	}
}

func TestIdleWatch(t *testing.T) {
	const n = 300
	before := runtime.NumGoroutine()
	w := new(idleWatch)
	ours, theirs := pairs(t, n)
	var ended [n]atomic.Int32
	var stops [n]func()
	for i, c := range ours {
		stops[i] = w.watch(c, func() { ended[i].Add(1); c.Close() })
		if stops[i] == nil {
			t.Fatalf("connection %d is not watched", i)
		}
	}
	if got := runtime.NumGoroutine(); got > before+2 {
		t.Errorf("%d goroutines for %d idle connections, want one more than the %d before", got, n, before)
	}
	total := func() (sum int) {
		for i := range ended {
			sum += int(ended[i].Load())
		}
		return sum
	}

	_, _ = io.WriteString(theirs[0], "news that nobody asked for")
	theirs[0].Close()                                    // the end, behind what was not read
	_ = theirs[1].(*net.TCPConn).SetLinger(0)            // reset
	theirs[1].Close()                                    //
	_ = theirs[2].(*net.TCPConn).CloseWrite()            // half closed
	_, _ = io.WriteString(theirs[3], "and still open\n") // no end
	within(t, "three ends", func() bool { return total() == 3 })
	for i := range 3 {
		if ended[i].Load() != 1 {
			t.Errorf("end of connection %d was told %d times, want once", i, ended[i].Load())
		}
	}

	for i := 3; i < 200; i++ { // given up: their end is nobody's business
		stops[i]()
		stops[i]()
		ours[i].Close()
	}
	for i := 200; i < n; i++ {
		theirs[i].Close()
	}
	within(t, "the end of all that are still watched", func() bool { return total() == 3+100 })
	within(t, "the end of the goroutine", func() bool { return runtime.NumGoroutine() <= before })
	if total() != 103 {
		t.Errorf("%d ends were told, want 103", total())
	}

	again, _ := pairs(t, 1) // after the last one, it begins anew
	stop := w.watch(again[0], func() {})
	if stop == nil {
		t.Fatal("nothing is watched any more")
	}
	stop()
	within(t, "the end of the goroutine", func() bool { return runtime.NumGoroutine() <= before })
}

// What is no socket is left to a goroutine.
func TestIdleWatchOfNoSocket(t *testing.T) {
	c, _ := net.Pipe()
	if new(idleWatch).watch(c, func() {}) != nil {
		t.Error("a pipe is watched by epoll, want nil")
	}
}
