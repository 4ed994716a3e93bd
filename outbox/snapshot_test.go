package outbox_test

import (
	"fmt"
	"testing"

	"posthaste/internal/testenv"
	"posthaste/outbox"
)

func TestSnapshotVisible(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, snap string
		xid        uint32
		want       bool
	}{
		{"below xmin", "100:110:100,105", 99, true},
		{"running", "100:110:100,105", 105, false},
		{"ended between", "100:110:100,105", 104, true},
		{"at xmax", "100:110:100,105", 110, false},
		{"beyond xmax", "100:110:100,105", 400, false},
		{"later epoch, below", "12884901988:12884901998:12884901988", 99, true}, // 3<<32 + 100 …
		{"later epoch, running", "12884901988:12884901998:12884901988", 100, false},
		{"just wrapped, id of before", "12884901890:12884901893:", 4294967290, true},
		{"about to wrap, id of after", "12884901880:12884901885:", 5, false},
		{"nothing running", "100:100:", 99, true},
	} {
		s, err := outbox.ParseSnapshot(c.snap)
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		testenv.Equal(t, c.name+": visible in "+c.snap, s.Visible(c.xid), c.want)
	}
	for _, bad := range []string{"", "1:2", "x:2:", "1:y:", "1:2:z", "1:2:3:4"} {
		if _, err := outbox.ParseSnapshot(bad); err == nil {
			t.Errorf("ParseSnapshot(%q) gave no error", bad)
		}
	}
}

// Whatever the server sends, there is no panic, and an id that is listed as running is not visible.
func FuzzParseSnapshot(f *testing.F) {
	f.Add("100:110:100,105", uint32(105))
	f.Add("12884901890:12884901893:", uint32(4294967290))
	f.Add("1:2:3:4", uint32(0))
	f.Fuzz(func(t *testing.T, text string, xid uint32) {
		if s, err := outbox.ParseSnapshot(text); err == nil {
			s.Visible(xid)
		}
		snap := fmt.Sprintf("%d:%d:%d", xid, uint64(xid)+1, xid)
		if s, err := outbox.ParseSnapshot(snap); err != nil || s.Visible(xid) {
			t.Errorf("%d is visible in %s, or %v", xid, snap, err)
		}
	})
}
