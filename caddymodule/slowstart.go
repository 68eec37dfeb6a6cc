package caddymodule

import (
	"math/rand/v2"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp/reverseproxy"

	"github.com/mcphealth/mcphealth/mcphealth"
)

// A roll is one throw of the dice for one choice: it must see each upstream alike
// however often it looks. The zero value, where there is no slow start, sees all as
// they are.
type roll struct {
	now  int64   // as clock says
	luck float64 // in [0, 1)
}

func (g *group) roll() roll {
	if g.check.SlowStart == 0 {
		return roll{}
	}
	return roll{now: clock(), luck: rand.Float64()}
}

// noteRecovery notes when the upstream came back.
func (e *entry) noteRecovery(c mcphealth.Change) {
	if c.From == mcphealth.Down && isUp(c.To) {
		e.upAgain.Store(int64(c.At.Sub(born)))
	}
}

// tierFor is tierOf for new work: an upstream that came back a moment ago is second
// choice, the less often the longer ago.
func (g *group) tierFor(r roll, members []*member, i int, u *reverseproxy.Upstream) mcphealth.Tier {
	tier := g.tierOf(members, i, u)
	if r.now != 0 && tier == mcphealth.TierUp {
		return g.ramped(r, members, i, u)
	}
	return tier
}

func (g *group) ramped(r roll, members []*member, i int, u *reverseproxy.Upstream) mcphealth.Tier {
	m := g.memberAt(members, i, u)
	if m == nil || m.entry == nil {
		return mcphealth.TierUp
	}
	at := m.entry.upAgain.Load()
	if at != 0 && float64(r.now-at) < r.luck*float64(g.check.SlowStart) {
		return mcphealth.TierDegraded
	}
	return mcphealth.TierUp
}
