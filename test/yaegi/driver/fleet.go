//go:build go1.21

package driver

import (
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// fleet is what StartFleet began; plain functions reach it, because methods of
// interpreted types cannot be called from compiled code.
var fleet struct {
	mu       sync.Mutex
	checkers []*mcphealth.Checker
	states   []string // per checker, "unknown>up>down"
	probes   []int
	mixed    []string // what reached the wrong checker
	stopping []func()
}

// StartFleet runs n checkers, checker i of url+"/"+i. Every change and result must
// reach the listener of its own checker: an interpreter that shares a variable
// between closures, or a frame between goroutines, shows here.
func StartFleet(url string, n, intervalMs, fastMs, timeoutMs int, limit int) string {
	scheduler := mcphealth.NewScheduler(mcphealth.Limits{AtOnce: limit})
	fleet.checkers = make([]*mcphealth.Checker, n)
	fleet.states, fleet.probes, fleet.mixed, fleet.stopping = make([]string, n), make([]int, n), nil, nil
	for i := 0; i < n; i++ {
		if err := join(i, fmt.Sprintf("%s/%d", url, i), mcphealth.Schedule{Scheduler: scheduler,
			Interval: time.Duration(intervalMs) * time.Millisecond, Fast: time.Duration(fastMs) * time.Millisecond}, timeoutMs); err != nil {
			return err.Error()
		}
	}
	for i := 0; i < n; i++ {
		fleet.checkers[i].Start()
	}
	return ""
}

func join(i int, url string, s mcphealth.Schedule, timeoutMs int) error {
	p, err := mcphealth.NewProber(mcphealth.Target{URL: url, Timeout: time.Duration(timeoutMs) * time.Millisecond}, nil)
	if err != nil {
		return err
	}
	c, err := mcphealth.NewChecker(p, s)
	if err != nil {
		return err
	}
	fleet.checkers[i], fleet.states[i] = c, string(mcphealth.StateUnknown)
	path := url[strings.LastIndex(url, "/"):]
	fleet.stopping = append(fleet.stopping, c.OnChange(func(ch mcphealth.Change) {
		fleet.mu.Lock()
		defer fleet.mu.Unlock()
		if ch.URL != url {
			fleet.mixed = append(fleet.mixed, "change of "+ch.URL+" at the listener of "+url)
		}
		if ch.From != ch.To {
			fleet.states[i] += ">" + string(ch.To)
		}
	}), c.OnResult(func(r mcphealth.Result) {
		fleet.mu.Lock()
		defer fleet.mu.Unlock()
		fleet.probes[i]++
		if r.URL != url {
			fleet.mixed = append(fleet.mixed, "result of "+r.URL+" at the listener of "+url)
		}
		if r.Server.Name != "" && r.Server.Name != path {
			fleet.mixed = append(fleet.mixed, "answer of "+r.Server.Name+" at the prober of "+url)
		}
	}))
	return nil
}

// FleetIn is how many checkers are in this state, by their snapshots.
func FleetIn(state string) int {
	n := 0
	for i := 0; i < len(fleet.checkers); i++ {
		if string(fleet.checkers[i].Snapshot().State) == state {
			n++
		}
	}
	return n
}

// FleetTier is how many checkers are in this tier.
func FleetTier(tier int) int {
	n := 0
	for i := 0; i < len(fleet.checkers); i++ {
		if int(fleet.checkers[i].Tier()) == tier {
			n++
		}
	}
	return n
}

// FleetStates is the path of each checker through the states.
func FleetStates() []string {
	fleet.mu.Lock()
	defer fleet.mu.Unlock()
	return append([]string(nil), fleet.states...)
}

// FleetProbes is how many results each listener heard.
func FleetProbes() []int {
	fleet.mu.Lock()
	defer fleet.mu.Unlock()
	return append([]int(nil), fleet.probes...)
}

// FleetMixed is what reached the wrong checker, and snapshots that are wrong.
func FleetMixed() []string {
	fleet.mu.Lock()
	all := append([]string(nil), fleet.mixed...)
	fleet.mu.Unlock()
	for i := 0; i < len(fleet.checkers); i++ {
		s, url := fleet.checkers[i].Snapshot(), fleet.checkers[i].Target().URL
		if s.URL != url || s.Last.URL != url || !strings.HasSuffix(url, fmt.Sprintf("/%d", i)) {
			all = append(all, fmt.Sprintf("snapshot %d: %s, %s, want %s", i, s.URL, s.Last.URL, url))
		}
	}
	return all
}

// FleetSnapshot is one snapshot as JSON, as a status page shows it.
func FleetSnapshot(i int) string {
	b, err := json.Marshal(fleet.checkers[i].Snapshot())
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// FleetTraffic tells checker i of one live request and how it ended.
func FleetTraffic(i int, ended string) {
	c := fleet.checkers[i]
	c.Sent()
	switch ended {
	case "answered":
		c.Answered("example.com")
	case "settled":
		c.Settled()
	case "failed":
		c.Failed()
	}
}

// FleetProbe asks checker i now.
func FleetProbe(i int) { fleet.checkers[i].Probe() }

// CloseFleet closes all checkers at once, each twice.
func CloseFleet() {
	for i := 0; i < len(fleet.stopping); i++ {
		fleet.stopping[i]()
	}
	var wg sync.WaitGroup
	for i := 0; i < len(fleet.checkers); i++ {
		wg.Add(1)
		go closeTwice(&wg, fleet.checkers[i])
	}
	wg.Wait()
}

func closeTwice(wg *sync.WaitGroup, c *mcphealth.Checker) {
	defer wg.Done()
	_ = c.Close()
	_ = c.Close()
}
