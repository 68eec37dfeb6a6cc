//go:build go1.21

package mcphealth

// threshold counts consecutive votes into a state: `rise` votes up bring an
// upstream up, `fall` votes down take it down, and an unknown verdict never votes.
type threshold struct {
	rise, fall int
	state      State
	ups, downs int  // votes in a row
	lenient    bool // votes down are counted, but take nothing down yet
}

// observe counts one verdict and reports whether the state changed.
func (t *threshold) observe(v Verdict) bool {
	before := t.state
	switch v.Vote() {
	case 1:
		t.ups, t.downs = t.ups+1, 0
		if t.up() || t.ups >= t.rise {
			t.state = Up
			if v == Degraded {
				t.state = UpDegraded
			}
		}
	case -1:
		t.ups, t.downs = 0, t.downs+1
		if t.downs >= t.fall && !t.lenient {
			t.state = Down
		}
	}
	return t.state != before
}

func (t *threshold) up() bool { return t.state == Up || t.state == UpDegraded }

// unconfirmed: votes against the present state have been cast, too few to change it.
func (t *threshold) unconfirmed() bool {
	return t.downs > 0 && t.state != Down || t.ups > 0 && !t.up()
}
