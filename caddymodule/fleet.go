package caddymodule

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig/caddyfile"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// Fleet is what bounds the probes of this edge, and of all edges together.
type Fleet struct {
	// How many probes this process may begin per second, whatever happens to all of its
	// upstreams at once. Default: twice what the intervals ask for, at least 1000
	ProbeCeiling int `json:"probe_ceiling,omitempty"`

	// How often all edges together may ask one upstream. Default: no bound
	ProbeBudget *ProbeBudget `json:"probe_budget,omitempty"`

	// A Redis through which edges that check the same upstream share what they find
	// out, so that one of them probes: `redis://[[user]:password@]host[:port][/db]`
	// or `rediss://…`. Global placeholders are replaced. While it is away, every edge
	// probes for itself. Checks with a header whose value is written out instead of
	// taken from a placeholder are not shared, nor are those of loopback and link-local
	// addresses and unix sockets, which are each machine's own, unless the store is at
	// one too. Default: none
	Share string `json:"share,omitempty"`
}

// ProbeBudget is how often the edges of a fleet may ask one upstream.
type ProbeBudget struct {
	// Probes per second, of all edges together.
	PerSecond float64 `json:"per_second"`

	// How many edges there are.
	Edges int `json:"edges"`
}

// floor is the least time between two probes of one upstream by this edge.
func (b *ProbeBudget) floor() time.Duration {
	if b == nil {
		return 0
	}
	return time.Duration(float64(b.Edges) / b.PerSecond * float64(time.Second))
}

// maxFloor is the longest time that a budget may put between two probes of one edge:
// an hour. More is a mistake in writing.
const maxFloor = time.Hour

func (f Fleet) validFleet() error {
	if f.ProbeCeiling < 0 {
		return fmt.Errorf("probe_ceiling %d: want a number, 1 or more", f.ProbeCeiling)
	}
	if b := f.ProbeBudget; b != nil {
		if !(b.PerSecond > 0 && b.PerSecond <= math.MaxFloat64) || b.Edges < 1 { // NaN is neither
			return fmt.Errorf("probe_budget: %v per second for %d edges: want more than 0 per second and at least one edge", b.PerSecond, b.Edges)
		}
		if float64(b.Edges)/b.PerSecond > maxFloor.Seconds() {
			return fmt.Errorf("probe_budget: each of %d edges would ask every %.0f s: want at most %v", b.Edges, float64(b.Edges)/b.PerSecond, maxFloor)
		}
	}
	return nil
}

// limits are what the scheduler is told.
func (f Fleet) limits() mcphealth.Limits { return mcphealth.Limits{PerSecond: f.ProbeCeiling} }

// unmarshalFleet reads the option that d stands on, if it is one of these.
func (f *Fleet) unmarshalFleet(d *caddyfile.Dispenser, name string) (known bool, err error) {
	set, want := false, 1
	switch name {
	case "probe_ceiling":
		set = f.ProbeCeiling != 0
	case "probe_budget":
		set, want = f.ProbeBudget != nil, 2
	case "share":
		set = f.Share != ""
	default:
		return false, nil
	}
	if set {
		return true, d.Errf("option '%s' is given twice", name)
	}
	args := d.RemainingArgs()
	if len(args) != want {
		return true, d.ArgErr()
	}
	switch name {
	case "probe_ceiling":
		f.ProbeCeiling, err = parseCount(strings.TrimSuffix(args[0], "/s"))
	case "probe_budget":
		err = f.parseBudget(args)
	case "share":
		f.Share = args[0]
		if !strings.Contains(f.Share, "{") {
			_, err = parseStore(f.Share)
		}
	}
	if err == nil {
		err = f.validFleet()
	}
	if err != nil {
		return true, d.Errf("bad value of '%s': %s", name, strings.TrimPrefix(err.Error(), name+": "))
	}
	return true, nil
}

func (f *Fleet) parseBudget(args []string) error {
	perSecond, err := strconv.ParseFloat(strings.TrimSuffix(args[0], "/s"), 64)
	if err != nil || !strings.HasSuffix(args[0], "/s") {
		return fmt.Errorf("'%s': want probes per second, such as 2/s", args[0])
	}
	edges, err := parseCount(args[1])
	if err != nil {
		return err
	}
	f.ProbeBudget = &ProbeBudget{PerSecond: perSecond, Edges: edges}
	return nil
}
