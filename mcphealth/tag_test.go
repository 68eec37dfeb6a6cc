package mcphealth

import (
	"fmt"
	"math/rand"
	"strings"
	"testing"
)

var (
	testKey  = NewSessionKey([]byte("a secret of an edge, 32 bytes ok"))
	otherKey = NewSessionKey([]byte("a secret of another edge, also.."))
)

func TestTag(t *testing.T) {
	a := testKey.Owner("tcp/app1:8000")
	tests := []struct {
		name, id string
		tagged   bool
	}{
		{"uuid", "9f86d081-884c-4d63-a3b5-1f0c5e1d2a3b", true},
		{"dots of its own", "a.b..c.", true},
		{"a dot alone", ".", true},
		{"looks like a tagged one", "x." + strings.Repeat("A", 23), true},
		{"a tag of ours, as from an edge behind this one", testKey.Tag("inner", a), true},
		{"a JWT", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0." + strings.Repeat("s", 43), true},
		{"all that is visible", "!\"#$%&'()*+,-./09:;<=>?@AZ[\\]^_`az{|}~", true},
		{"4 KiB", strings.Repeat("i", maxSessionID), true},
		{"longer", strings.Repeat("i", maxSessionID+1), false},
		{"empty", "", false},
		{"a space", "a b", false},
		{"a line break", "a\r\nSet-Cookie: x=1", false},
		{"not ASCII", "é", false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := testKey.Tag(tt.id, a)
			if !tt.tagged {
				if got != tt.id {
					t.Fatalf("Tag(%q) = %q, want it as it is", tt.id, got)
				}
				return
			}
			if !strings.HasPrefix(got, tt.id+".") || len(got) > len(tt.id)+24 || !isSessionID(got) {
				t.Fatalf("Tag(%q) = %q, want the id, a dot and at most 23 visible letters", tt.id, got)
			}
			if id, o, ok := testKey.Split(got); id != tt.id || o != a || !ok {
				t.Errorf("Split(%q) = %q, %x, %v, want %q, %x, true", got, id, o, ok, tt.id, a)
			}
			if again := NewSessionKey(testKey.secret).Tag(tt.id, a); again != got {
				t.Errorf("an edge with the same key gives %q, want %q", again, got)
			}
		})
	}
}

// What this key did not make for this very id goes on as it is.
func TestSplitForged(t *testing.T) {
	a, b := testKey.Owner("a"), testKey.Owner("b")
	mine := testKey.Tag("mine", a)
	tag := mine[len("mine"):]
	flipped := []byte(mine)
	flipped[6] ^= 1 // in the owner
	last := []byte(mine)
	last[len(last)-1] = map[bool]byte{true: 'B', false: 'A'}[last[len(last)-1] == 'A']
	tests := []struct{ name, id string }{
		{"empty", ""},
		{"no tag", "9f86d081-884c-4d63-a3b5-1f0c5e1d2a3b"},
		{"the tag alone", tag},
		{"moved to another session", "other" + tag},
		{"moved to a longer id", "mine." + tag},
		{"another edge's", otherKey.Tag("mine", otherKey.Owner("a"))},
		{"another owner", string(flipped)},
		{"another spelling of the last letter", string(last)},
		{"cut", mine[:len(mine)-1]},
		{"longer", mine + "A"},
		{"another separator", strings.Replace(mine, ".", "~", 1)},
		{"no base64", "mine." + strings.Repeat(".", 23)},
		{"padding", "mine." + strings.Repeat("=", 23)},
		{"line breaks", mine[:len(mine)-2] + "\r\n"},
		{"zeros", "mine." + strings.Repeat("A", 23)},
		{"huge", strings.Repeat("i", 1<<20) + tag},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if id, o, ok := testKey.Split(tt.id); ok || id != tt.id || o != 0 {
				t.Errorf("Split(%.80q) = %.80q, %x, %v, want it as it is", tt.id, id, o, ok)
			}
		})
	}
	if a == b {
		t.Error("two addresses have the same owner")
	}
}

// A tag tells nobody but the key's holders whose it is: those of neighbours have
// nothing in common.
func TestTagsShowNoNeighbours(t *testing.T) {
	a := testKey.Owner("app1:8000")
	seen := map[string]bool{}
	for i := 0; i < 100_000; i++ {
		id := fmt.Sprint("s", i)
		tagged := testKey.Tag(id, a)
		hidden := tagged[len(id)+1 : len(id)+9]
		if seen[hidden] {
			t.Fatalf("session %d shows the same owner as another: %q", i, hidden)
		}
		seen[hidden] = true
		if got, o, ok := testKey.Split(tagged); got != id || o != a || !ok {
			t.Fatalf("Split(%q) = %q, %x, %v", tagged, got, o, ok)
		}
	}
}

// No guess in a hundred thousand hits.
func TestTagsAreNotGuessed(t *testing.T) {
	const letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
	for i := 0; i < 100_000; i++ {
		guess := []byte("mine." + noTag)
		for j := 5; j < len(guess); j++ {
			guess[j] = letters[rand.Intn(len(letters))]
		}
		if _, _, ok := testKey.Split(string(guess)); ok {
			t.Fatalf("%q is taken for ours", guess)
		}
	}
}

func TestTagAllocates(t *testing.T) {
	id := "9f86d081-884c-4d63-a3b5-1f0c5e1d2a3b"
	tagged := testKey.Tag(id, 5)
	if n := testing.AllocsPerRun(1000, func() { testKey.Split(tagged) }); n > 0 && !raceEnabled {
		t.Errorf("Split allocates %v times, want none", n)
	}
	if n := testing.AllocsPerRun(1000, func() { testKey.Tag(id, 5) }); n > 1 && !raceEnabled {
		t.Errorf("Tag allocates %v times, want once: the string", n)
	}
}

func TestHasSessions(t *testing.T) {
	tests := []struct {
		version string
		want    bool
	}{
		{"", true}, {"2025-03-26", true}, {"2025-11-25", true}, {"2026-07-27", true},
		{"2026-07-28", false}, {"2027-01-01", false}, {"9999-99-99", false},
		{"DRAFT-2026", true}, {"draft-abcd", true}, {"3", true}, {"2026-07-28-rc", true},
	}
	for _, tt := range tests {
		if got := HasSessions(tt.version); got != tt.want {
			t.Errorf("HasSessions(%q) = %v, want %v", tt.version, got, tt.want)
		}
	}
}

func TestOpensSession(t *testing.T) {
	tests := []struct {
		name, method, body string
		want               bool
	}{
		{"initialize", "POST", `{"jsonrpc":"2.0","id":1,"method":"initialize","params":{}}`, true},
		{"method last", "POST", `{"params":{"method":"ping","a":[{}]},"id":1,"method":"initialize"}`, true},
		{"cut off after it", "POST", `{"method":"initialize","params":{"x":"aa`, true},
		{"in the parameters only", "POST", `{"method":"tools/call","params":{"method":"initialize"}}`, false},
		{"its notification", "POST", `{"method":"notifications/initialized"}`, false},
		{"another", "POST", `{"method":"ping"}`, false},
		{"GET", "GET", `{"method":"initialize"}`, false},
		{"batch", "POST", `[{"method":"initialize"}]`, false},
		{"empty", "POST", ``, false},
		{"no text", "POST", `{"method":{"method":"initialize"}}`, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := OpensSession(tt.method, []byte(tt.body)); got != tt.want {
				t.Errorf("OpensSession(%s, %q) = %v, want %v", tt.method, tt.body, got, tt.want)
			}
		})
	}
}

func BenchmarkTag(b *testing.B) {
	id := "9f86d081-884c-4d63-a3b5-1f0c5e1d2a3b"
	tagged := testKey.Tag(id, 5)
	b.Run("Tag", func(b *testing.B) {
		b.ReportAllocs()
		for i := 0; i < b.N; i++ {
			testKey.Tag(id, 5)
		}
	})
	b.Run("Split", func(b *testing.B) {
		b.ReportAllocs()
		for i := 0; i < b.N; i++ {
			testKey.Split(tagged)
		}
	})
}
