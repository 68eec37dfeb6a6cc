package caddymodule

import (
	"encoding/json"
	"fmt"
	"net/http"
	"reflect"
	"strconv"
	"sync"
	"time"
)

const (
	// maxListeners is how many streams one mcp_status serves at once: 64, a screen for
	// each of a large team. Further ones get 503, and the page says that it is not live.
	maxListeners = 64

	// newsEvery is the shortest time between two looks for what is new: 500 ms, at
	// which people see no delay. measuresEvery is that for what is measured all the
	// time: 5 s, half the default interval of probes.
	newsEvery     = 500 * time.Millisecond
	measuresEvery = 5 * time.Second

	// beatEvery is how often a stream says that it lives: 10 s. The page gives one up
	// that is silent for three times that.
	beatEvery = 10 * time.Second

	// frameQueue is how many frames may wait for a client: 8, some seconds' worth. One
	// that reads slower is hung up on; it comes back and gets all anew.
	frameQueue = 8

	// margin is how much a page may be older than it says: 1 s, to be made.
	margin = time.Second

	// writeTimeout bounds one write to a client: 10 s.
	writeTimeout = 10 * time.Second
)

// A hub tells its listeners what changes. While there are any, one goroutine looks
// for it and renders it, once for all of them; it ends with the last listener.
type hub struct {
	view func() *statusDocument

	mu        sync.Mutex
	listeners map[chan []byte]struct{}
	quit      chan struct{} // ends the goroutine; nil: there is none
	closed    bool
	shown     map[string]shown
	order     map[string][]string
}

// shown is a piece as the listeners have it.
type shown struct {
	piece piece
	html  string
}

func newHub(view func() *statusDocument) *hub {
	return &hub{view: view, listeners: make(map[chan []byte]struct{})}
}

// join adds a listener. Its channel has what is new since then, and later what changes;
// it is closed when the hub is, or when the listener does not keep up. ok is false if
// there are too many, or the hub is closed.
func (h *hub) join(since time.Time) (frames chan []byte, ok bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed || len(h.listeners) >= maxListeners {
		return nil, false
	}
	frames = make(chan []byte, frameQueue)
	h.listeners[frames] = struct{}{}
	if h.quit == nil {
		h.quit = make(chan struct{})
		changed, cancel := observers.subscribe()
		go h.run(h.quit, changed, cancel)
	}
	frames <- h.frame(h.refresh(true), h.newer(since), true)
	return frames, true
}

// leave removes a listener; one that the hub hung up on is gone already.
func (h *hub) leave(frames chan []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.drop(frames)
}

// drop removes a listener. The caller holds h.mu.
func (h *hub) drop(frames chan []byte) {
	if _, ok := h.listeners[frames]; !ok {
		return
	}
	delete(h.listeners, frames)
	close(frames)
	if len(h.listeners) == 0 {
		close(h.quit)
		h.quit, h.shown, h.order = nil, nil, nil
	}
}

// close ends all streams for good.
func (h *hub) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for frames := range h.listeners {
		h.drop(frames)
	}
}

// run looks for news when something has changed, for measures regularly, and never
// takes more than a twentieth of a core for it.
func (h *hub) run(quit chan struct{}, changed <-chan struct{}, cancel func()) {
	defer cancel()
	life := time.NewTicker(beatEvery)
	defer life.Stop()
	measures, news := time.NewTimer(measuresEvery), time.NewTimer(newsEvery)
	defer measures.Stop()
	defer news.Stop()
	for {
		select {
		case <-quit:
			return
		case now := <-life.C:
			h.tell(quit, func() { h.broadcast(frameOf("beat", beat{now.UnixMilli()})) })
		case <-measures.C:
			took := h.tell(quit, func() { h.refresh(true) })
			measures.Reset(max(measuresEvery, 20*took))
		case <-news.C:
			var took time.Duration
			select {
			case <-changed:
				took = h.tell(quit, func() { h.refresh(false) })
			default:
			}
			news.Reset(max(newsEvery, 20*took))
		}
	}
}

// tell does something for the listeners, if they are still those of the goroutine, and
// says how long it took.
func (h *hub) tell(quit chan struct{}, f func()) time.Duration {
	h.mu.Lock()
	defer h.mu.Unlock()
	start := time.Now()
	if h.quit == quit {
		f()
	}
	return time.Since(start)
}

// broadcast gives a frame to everybody, and hangs up on those who have not taken
// those before. The caller holds h.mu.
func (h *hub) broadcast(frame []byte) {
	for frames := range h.listeners {
		select {
		case frames <- frame:
		default:
			h.drop(frames)
		}
	}
}

// refresh looks for what is new and broadcasts it: all of it, or only what is news.
// The caller holds h.mu.
func (h *hub) refresh(all bool) *layout {
	l := h.view().layout()
	before, order := h.shown, h.order
	h.shown, h.order = make(map[string]shown, len(l.pieces)), l.order
	changed := map[string]string{}
	var news []byte
	for id, p := range l.pieces {
		was, known := before[id]
		if known && (reflect.DeepEqual(was.piece, p) || !all && !isNews(was.piece, p)) {
			h.shown[id] = was
			continue
		}
		h.shown[id] = shown{p, l.piece(p)}
		changed[id] = h.shown[id].html
		if known {
			news = appendNews(news, was.piece, p)
		}
	}
	moved := !reflect.DeepEqual(order, h.order)
	if before != nil && (len(changed) > 0 || moved) {
		h.broadcast(append(news, h.frame(l, changed, moved)...))
	}
	return l
}

// isNews reports whether a piece says more than what is measured all the time.
func isNews(was, is piece) bool {
	switch is := is.(type) {
	case rowPiece:
		was := was.(rowPiece)
		return was.Open != is.Open || was.U.State != is.U.State || was.U.Reason != is.U.Reason || was.U.Draining != is.U.Draining || was.U.Overdue != is.U.Overdue
	case budgetPiece:
		return false
	}
	return true
}

// appendNews appends an event `change` for each change of the upstream.
func appendNews(b []byte, was, is piece) []byte {
	row, ok := is.(rowPiece)
	if !ok {
		return b
	}
	var last time.Time
	if old := was.(rowPiece).U.Changes; len(old) > 0 {
		last = old[len(old)-1].At
	}
	for _, c := range row.U.changesAfter(last) {
		b = append(b, frameOf("change", c)...)
	}
	return b
}

// newer are the pieces without the rows that say the same as then.
func (h *hub) newer(since time.Time) map[string]string {
	all := make(map[string]string, len(h.shown))
	for id, s := range h.shown {
		if r, ok := s.piece.(rowPiece); !ok || r.touched().After(since.Add(-margin)) {
			all[id] = s.html
		}
	}
	return all
}

// touched is when something was last found out about the upstream.
func (r rowPiece) touched() (t time.Time) {
	if all := r.U.upstreamDetail.History; len(all) > 0 {
		t = all[len(all)-1].At.Add(time.Duration(r.U.LatencyMs * float64(time.Millisecond)))
	}
	if all := r.U.Changes; len(all) > 0 && all[len(all)-1].At.After(t) {
		t = all[len(all)-1].At
	}
	if since := r.U.DrainingSince; since != nil && since.After(t) {
		t = *since
	}
	return t
}

// frame is the event `render`: pieces of the page by id and, if any has moved, which
// of them stand in which container.
func (h *hub) frame(l *layout, pieces map[string]string, moved bool) []byte {
	r := render{At: l.doc.At.UnixMilli(), Title: l.title(), Icon: string(l.icon()), Parts: pieces}
	if moved {
		r.Order = l.order
	}
	return frameOf("render", r)
}

// beat is the event that says that the stream lives.
type beat struct {
	At int64 `json:"at"` // Unix milliseconds
}

type render struct {
	At    int64               `json:"at"` // Unix milliseconds
	Title string              `json:"title"`
	Icon  string              `json:"icon"`
	Parts map[string]string   `json:"parts"`
	Order map[string][]string `json:"order,omitempty"`
}

// frameOf is one event of a stream. JSON has no line breaks.
func frameOf(name string, v any) []byte {
	data, err := json.Marshal(v)
	if err != nil {
		return nil // cannot happen: all fields are plain
	}
	return fmt.Appendf(nil, "event: %s\ndata: %s\n\n", name, data)
}

// serveStream sends what changes until the client goes, the hub closes, or the client
// is too slow.
func (s *Status) serveStream(w http.ResponseWriter, r *http.Request) error {
	w.Header().Set("Content-Type", typeStream)
	w.Header().Set("Cache-Control", "no-store, no-transform") // compression would hold events back
	if r.Method == http.MethodHead {
		w.WriteHeader(http.StatusOK)
		return nil
	}
	since, _ := strconv.ParseInt(r.URL.Query().Get("since"), 10, 64)
	frames, ok := s.hub.join(time.UnixMilli(since))
	if !ok {
		w.Header().Set("Retry-After", "10")
		http.Error(w, "as many streams as there may be are open, or the server stops", http.StatusServiceUnavailable)
		return nil
	}
	defer s.hub.leave(frames)
	conn := http.NewResponseController(w)
	send := func(b []byte) bool {
		_ = conn.SetWriteDeadline(time.Now().Add(writeTimeout)) // also instead of the server's write_timeout
		_, err := w.Write(b)
		return err == nil && conn.Flush() == nil
	}
	w.WriteHeader(http.StatusOK)
	if !send([]byte("retry: 2000\n\n")) {
		return nil
	}
	for {
		select {
		case <-r.Context().Done():
			return nil
		case frame, open := <-frames:
			if !open || !send(frame) {
				return nil
			}
		}
	}
}
