package mcphealth

import "testing"

func TestThreshold(t *testing.T) {
	tests := []struct {
		name       string
		rise, fall int
		feed       string // R ready, G degraded, D dead, ? unknown
		want       string // state after each: + up, g degraded, - down, ? unknown
	}{
		{"one vote up is enough", 1, 2, "R", "+"},
		{"rise counts consecutive passes only", 2, 1, "RDRR", "?--+"},
		{"fall tolerates a blip", 1, 3, "RDDRDDD", "++++++-"},
		{"unknown never votes", 1, 1, "R???D", "++++-"},
		{"unknown does not interrupt a fall", 1, 2, "RD?D", "+++-"},
		{"degraded is up, second tier", 1, 2, "RGRG", "+g+g"},
		{"degraded interrupts a fall", 1, 2, "RDGD", "++gg"},
		{"never seen alive goes down too", 1, 2, "DD", "?-"},
		{"rise holds back an upstream that fell", 2, 1, "DRR", "--+"},
	}
	letters := map[rune]Verdict{'R': Ready, 'G': Degraded, 'D': Dead, '?': Unknown}
	marks := map[State]string{Up: "+", UpDegraded: "g", Down: "-", StateUnknown: "?"}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			th := threshold{rise: tt.rise, fall: tt.fall, state: StateUnknown}
			got := ""
			for _, c := range tt.feed {
				th.observe(letters[c])
				got += marks[th.state]
			}
			if got != tt.want {
				t.Errorf("observe(%q) = %q, want %q", tt.feed, got, tt.want)
			}
		})
	}
}
