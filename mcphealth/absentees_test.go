package mcphealth

import (
	"testing"
	"testing/synctest"
	"time"
)

func TestAbsentees(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var a Absentees
		a.Found(1)
		start := time.Now()
		if since := a.Since(1); !since.Equal(start) || a.Len() != 1 {
			t.Errorf("missing since %s, %d in all", since, a.Len())
		}
		time.Sleep(time.Second)
		if since := a.Since(1); !since.Equal(start) {
			t.Errorf("later: missing since %s, want %s", since, start)
		}
		a.Found(2)
		a.Found(1)
		if since := a.Since(1); since.Equal(start) || a.Len() != 1 {
			t.Errorf("missing again since %s, %d in all", since, a.Len())
		}
		for o := range Owner(maxAbsentees + 5) {
			a.Since(o)
		}
		if a.Len() > maxAbsentees {
			t.Errorf("%d are remembered", a.Len())
		}
	})
}
