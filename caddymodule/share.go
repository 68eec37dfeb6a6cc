package caddymodule

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/zap"

	"github.com/caddyserver/caddy/v2"

	"github.com/mcphealth/mcphealth/mcphealth"
)

const (
	// sharePrefix begins all keys in the store; the number is that of what they hold.
	sharePrefix = "mcphealth:1:"

	// storeTimeout bounds one question to the store: 500 ms, a tenth of a probe's own
	// time. A store that does not answer is away.
	storeTimeout = 500 * time.Millisecond

	// storeRetry is how long an edge does without a store that is away.
	storeRetry = time.Second

	// storePing is how often an edge makes sure that it still hears the store.
	storePing = time.Second

	// storeSteady is how long the store has to do well before it is away once more, and
	// that is said: 10 s, so that one which comes and goes does not fill the log.
	storeSteady = 10 * time.Second

	// storeConns is how many questions are under way to the store at once, unless its URL
	// says so (pool_size): 128, for 10,000 upstreams at 10 s are 2,000 questions in a
	// second, and a store may be 50 ms away. maxStoreConns is how many it may say: 10,000,
	// what a Redis takes by default. storeBuffer is what each has: 4 KiB.
	storeConns    = 128
	maxStoreConns = 10_000
	storeBuffer   = 4 << 10

	// alarmLease is how long one edge alone looks into what several of them noticed.
	alarmLease = time.Second
)

// A sharer shares what edges find out, through a Redis: of those that check the same
// upstream in the same way one probes and tells the others. It is one of the app, and
// lives as long.
type sharer struct {
	client *redis.Client
	local  bool   // the store is on this machine, and so is who uses it
	pubsub string // the name of the channel
	log    *zap.Logger
	away   atomic.Int64 // until then the store is not asked, as clock says
	silent atomic.Bool  // it is away, and that was said
	hears  atomic.Bool  // it is listened to
	ended  atomic.Bool  // stop was called
	cancel context.CancelFunc
	done   chan struct{}
}

// edgeName is this process to the others, over all of its configurations.
var edgeName = rand.Text()

// maxEdgeName is how long another one's may be, in bytes: twice ours.
const maxEdgeName = 64

// errShareURL is a store that cannot be one. What was written is not repeated: it may
// hold a password.
var errShareURL = errors.New("share: want redis://[[user]:password@]host[:port][/database], or rediss://…, or unix://…")

func parseStore(url string) (*redis.Options, error) {
	options, err := redis.ParseURL(url)
	if err != nil {
		return nil, errShareURL
	}
	if options.PoolSize < 0 || options.PoolSize > maxStoreConns {
		return nil, fmt.Errorf("share: pool_size %d: want a number from 1 to %d", options.PoolSize, maxStoreConns)
	}
	return options, nil
}

// newSharer makes a sharer for the store at url, whose placeholders are replaced. It dials
// nobody yet. What else the URL may say to the client library is left out: connections
// that are made in advance nobody would end if the configuration does not start, and of
// some numbers the library makes a panic.
func newSharer(url string, log *zap.Logger) (*sharer, error) {
	o, err := parseStore(caddy.NewReplacer().ReplaceKnown(url, ""))
	if err != nil {
		return nil, err
	}
	redis.SetLogger(quiet{})
	client := redis.NewClient(&redis.Options{
		Network: o.Network, Addr: o.Addr, TLSConfig: o.TLSConfig,
		Username: o.Username, Password: o.Password, DB: o.DB,
		Protocol: o.Protocol, ClientName: o.ClientName,
		DialTimeout: storeTimeout, ReadTimeout: storeTimeout, WriteTimeout: storeTimeout,
		PoolTimeout: storeTimeout, PoolSize: or(o.PoolSize, storeConns),
		ReadBufferSize: storeBuffer, WriteBufferSize: storeBuffer,
		ContextTimeoutEnabled: true, MaxRetries: -1,
	})
	return &sharer{client: client, local: isOwn(o.Network, o.Addr), log: log, done: make(chan struct{}),
		pubsub: sharePrefix + "results:" + strconv.Itoa(o.DB)}, nil
}

// quiet drops what the client library would print of lost connections: the sharer says
// it once.
type quiet struct{}

// Printf drops a line.
func (quiet) Printf(context.Context, string, ...any) {}

// start begins to listen.
func (s *sharer) start() {
	var ctx context.Context
	ctx, s.cancel = context.WithCancel(context.Background())
	go s.run(ctx)
}

// stop ends that, and waits for it.
func (s *sharer) stop() {
	s.ended.Store(true)
	if s.cancel != nil {
		s.cancel()
		<-s.done
	}
	_ = s.client.Close()
}

// run listens to the store, again and again, until ctx ends.
func (s *sharer) run(ctx context.Context) {
	defer close(s.done)
	for ctx.Err() == nil {
		err := s.listen(ctx)
		if ctx.Err() != nil {
			return
		}
		s.lost(err)
		select {
		case <-time.After(storeRetry):
		case <-ctx.Done():
		}
	}
}

// listen hears what other edges tell until the store is lost.
func (s *sharer) listen(ctx context.Context) error {
	defer caught("listening to the store")
	sub := s.client.Subscribe(ctx, s.pubsub)
	defer sub.Close()
	defer context.AfterFunc(ctx, func() { _ = sub.Close() })() // go-redis reads on when its context has ended
	if _, err := sub.ReceiveTimeout(ctx, storeTimeout); err != nil {
		return err
	}
	s.hears.Store(true)
	defer s.hears.Store(false)
	s.away.Store(0)
	s.back()
	for asked := false; ; {
		m, err := sub.ReceiveTimeout(ctx, storePing)
		var timeout interface{ Timeout() bool }
		switch {
		case err == nil:
			asked = false
		case !errors.As(err, &timeout) || !timeout.Timeout() || asked:
			return err
		default: // nothing was said for a while
			asked = true
			if err := sub.Ping(ctx); err != nil {
				return err
			}
		}
		if m, ok := m.(*redis.Message); ok {
			s.receive(m.Payload)
		}
	}
}

// lost notes that the store is away, for a moment: until then all edges probe. Who has
// trusted in others does so within half an interval.
func (s *sharer) lost(err error) {
	if s.ended.Load() {
		return // by stop: another configuration has a sharer of its own
	}
	s.away.Store(clock() + int64(storeRetry))
	if s.silent.Swap(true) {
		return
	}
	s.log.Warn("the store of shared verdicts is away: this edge probes all its upstreams itself", zap.Error(err))
	for _, e := range checkers.list() {
		if s.shares(e) {
			e.checker.ProbeWithin(e.interval / 2)
		}
	}
}

// back ends what lost has begun.
func (s *sharer) back() {
	if s.silent.Swap(false) {
		s.log.Info("the store of shared verdicts is back")
	}
}

// served notes that the store did what it was asked. What lost has begun may have been a
// moment's, of which the listener noticed nothing.
func (s *sharer) served() {
	if s.silent.Load() && s.hears.Load() && clock()-s.away.Load() > int64(storeSteady) {
		s.back()
	}
}

func (s *sharer) isAway() bool { return clock() < s.away.Load() }

// told is a message: who found what out about which upstream.
type told struct {
	Edge   string          `json:"edge"`
	Key    string          `json:"key"`
	Result json.RawMessage `json:"result"`
}

// receive hears one message. Whoever can write into the store may have written it.
func (s *sharer) receive(payload string) {
	var t told
	if len(payload) > maxTold || json.Unmarshal([]byte(payload), &t) != nil || len(t.Edge) > maxEdgeName || t.Edge == edgeName {
		return
	}
	if s != currentSharer() {
		return // around a reload two listen, and each verdict counts once
	}
	for _, e := range checkers.sharing(t.Key) {
		if s.shares(e) {
			e.hear(t)
		}
	}
}

// maxTold is how long a message may be: what mcphealth.ReadShared takes, and the rest.
const maxTold = 10 << 10

// hear counts what another edge found out, if it did and is to be believed.
func (e *entry) hear(t told) bool {
	r, err := mcphealth.ReadShared(t.Result)
	if err != nil || r.Verdict.Vote() == 0 {
		return false
	}
	e.checker.Hear(t.Edge, r)
	return true
}

// tell passes on what a probe here found out. Where it could not, another edge may: the
// lease is given back.
func (s *sharer) tell(e *entry, r mcphealth.Result) {
	if !s.shares(e) || s.isAway() {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), storeTimeout)
	defer cancel()
	if r.Verdict.Vote() == 0 {
		if err := endLease.Run(ctx, s.client, []string{e.key("lease"), e.key("alarm")}, edgeName).Err(); err != nil {
			s.lost(err)
		}
		return
	}
	message, err := json.Marshal(told{Edge: edgeName, Key: e.shared, Result: r.Share()})
	if err != nil {
		return // cannot happen: the result is JSON
	}
	pipe := s.client.Pipeline()
	pipe.Set(ctx, e.key("last"), message, 2*e.interval)
	pipe.Publish(ctx, s.pubsub, message)
	if _, err := pipe.Exec(ctx); err != nil {
		s.lost(err)
		return
	}
	s.served()
}

// key is where the store has something about e.
func (e *entry) key(of string) string { return sharePrefix + e.shared + ":" + of }

// takeLease takes or renews a lease. It returns 0 to its holder, and to others for how
// long it still runs, in ms; and what was last found out, or the beginning of it if it is
// longer than may be.
var takeLease = redis.NewScript(`
local holder = redis.call('GET', KEYS[1])
if not holder or holder == ARGV[1] then
	redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
	return {0, false}
end
return {redis.call('PTTL', KEYS[1]), redis.call('GETRANGE', KEYS[2], 0, ARGV[3])}
`)

// endLease ends leases that are still ours.
var endLease = redis.NewScript(`
for _, key in ipairs(KEYS) do
	if redis.call('GET', key) == ARGV[1] then
		redis.call('DEL', key)
	end
end
return 0
`)

// lease is how long another edge keeps the right to probe e: 0 if it is ours, or if
// the store is away. For alarms there is a short lease of its own.
func (s *sharer) lease(e *entry, urgent bool) time.Duration {
	if !s.shares(e) || s.isAway() {
		return 0
	}
	regular := e.interval + e.interval/5
	name, length := "lease", regular
	if urgent {
		name, length = "alarm", alarmLease
	}
	ctx, cancel := context.WithTimeout(context.Background(), storeTimeout)
	defer cancel()
	answer, err := takeLease.Run(ctx, s.client, []string{e.key(name), e.key("last")}, edgeName, length.Milliseconds(), maxTold).Slice()
	if err != nil {
		s.lost(err)
		return 0
	}
	s.served()
	if len(answer) != 2 {
		return 0
	}
	ms, _ := answer[0].(int64)
	wait := min(max(time.Duration(ms)*time.Millisecond, 0), length)
	if wait == 0 {
		return 0
	}
	heard := e.checker.Snapshot().LastAt
	if heard.IsZero() {
		var last told
		said, _ := answer[1].(string)
		if len(said) > maxTold || json.Unmarshal([]byte(said), &last) != nil || !e.hear(last) {
			return 0 // nothing is known of it: better to ask than to wait
		}
	} else if time.Since(heard) > 2*regular {
		return 0 // whoever holds the lease tells nothing
	}
	return wait + wait/10
}

// share is a stable name of what is asked, the same on all edges that ask it, and "" for
// what cannot be shared: a header whose value is written out may be a secret, and no name
// is to be guessed from. What only says when is left out.
func (q question) share() string {
	header := make(http.Header, len(q.Target.Header))
	for name, values := range q.Target.Header {
		for _, v := range values {
			if !strings.HasPrefix(v, "{") && !strings.Contains(v, " {") {
				return ""
			}
			header.Add(name, v[strings.Index(v, "{"):])
		}
	}
	q.Target.Header = header
	target, err := json.Marshal(q.Target)
	if err != nil {
		return ""
	}
	sum := sha256.Sum256(bytes.Join([][]byte{[]byte(q.Network), []byte(q.Address), target}, []byte{0}))
	return hex.EncodeToString(sum[:16])
}

// shares reports whether what is found out about e concerns other edges.
func (s *sharer) shares(e *entry) bool { return e.shared != "" && (s.local || !e.own) }

// isOwn reports whether an address means another server on each machine: a loopback or
// link-local one, or a socket in the file system.
func isOwn(network, address string) bool {
	if isLocal(network) {
		return true
	}
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		host = address
	}
	host = strings.ToLower(strings.TrimSuffix(host, "."))
	if host == "" || host == "localhost" || strings.HasSuffix(host, ".localhost") {
		return true
	}
	ip, err := netip.ParseAddr(host)
	ip = ip.Unmap()
	return err == nil && (ip.IsLoopback() || ip.IsUnspecified() || ip.IsLinkLocalUnicast())
}

// currentSharer is that of the configuration that runs, or nil.
func currentSharer() *sharer {
	if app := apps.current(); app != nil {
		return app.sharer
	}
	return nil
}

// provisionShare makes what Share asks for.
func (a *App) provisionShare() (err error) {
	if a.Share == "" {
		return nil
	}
	a.sharer, err = newSharer(a.Share, a.logger)
	return err
}
