package caddymodule

import (
	"net"
	"os"
	"sync"
	"syscall"
)

// idleWatch tells of the end of idle connections, of any number with one goroutine,
// which runs while there are any. Its epoll is itself waited for by the runtime's, so
// that no thread blocks. What a server may still send on an idle connection is not read:
// only the end counts.
type idleWatch struct {
	mu    sync.Mutex
	epoll *os.File // nil while nothing is watched
	next  uint64
	conns map[uint64]func() // what to call at the end, by the token of its events
}

// watch has ended called once when the other side ends c. It returns how to give up just
// before c is closed, which takes it out of the epoll, and nil if it cannot watch c. See
// mcphealth.Scheduler.Watch.
func (w *idleWatch) watch(c net.Conn, ended func()) (stop func()) {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return nil
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return nil
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.epoll == nil && w.open() != nil {
		return nil
	}
	w.next++
	token := w.next
	w.conns[token] = ended
	event := syscall.EpollEvent{Events: syscall.EPOLLRDHUP | syscall.EPOLLONESHOT, Fd: int32(token), Pad: int32(token >> 32)}
	if err := w.add(raw, &event); err != nil {
		w.forget(token)
		return nil
	}
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.conns[token] != nil {
			w.forget(token)
		}
	}
}

// open makes the epoll and has it waited for. The caller holds w.mu.
func (w *idleWatch) open() error {
	fd, err := syscall.EpollCreate1(syscall.EPOLL_CLOEXEC)
	if err != nil {
		return err
	}
	if err := syscall.SetNonblock(fd, true); err != nil { // else os.NewFile would not poll it
		_ = syscall.Close(fd)
		return err
	}
	w.epoll = os.NewFile(uintptr(fd), "epoll of idle connections")
	w.conns = make(map[uint64]func())
	raw, err := w.epoll.SyscallConn()
	if err != nil {
		_ = w.epoll.Close()
		w.epoll = nil
		return err
	}
	go w.wait(raw)
	return nil
}

// add puts a socket in. The caller holds w.mu.
func (w *idleWatch) add(socket syscall.RawConn, event *syscall.EpollEvent) error {
	epoll, err := w.epoll.SyscallConn()
	if err != nil {
		return err
	}
	outer := epoll.Control(func(epfd uintptr) {
		inner := socket.Control(func(fd uintptr) { err = syscall.EpollCtl(int(epfd), syscall.EPOLL_CTL_ADD, int(fd), event) })
		if inner != nil {
			err = inner
		}
	})
	if outer != nil {
		return outer
	}
	return err
}

// forget takes one out, and ends the goroutine with the last. The caller holds w.mu.
func (w *idleWatch) forget(token uint64) {
	delete(w.conns, token)
	if len(w.conns) == 0 {
		_ = w.epoll.Close()
		w.epoll = nil
	}
}

// wait calls those whose connections end until the epoll is closed.
func (w *idleWatch) wait(epoll syscall.RawConn) {
	events := make([]syscall.EpollEvent, 128)
	for {
		n := 0
		err := epoll.Read(func(fd uintptr) bool {
			n, _ = syscall.EpollWait(int(fd), events, 0)
			return n != 0
		})
		if err != nil {
			return
		}
		for i := range max(n, 0) {
			w.end(uint64(uint32(events[i].Fd)) | uint64(uint32(events[i].Pad))<<32)
		}
	}
}

func (w *idleWatch) end(token uint64) {
	w.mu.Lock()
	ended := w.conns[token]
	if ended != nil {
		w.forget(token)
	}
	w.mu.Unlock()
	if ended != nil {
		ended() // which closes the connection, and so takes it out of the epoll
	}
}
