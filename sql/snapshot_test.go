package sql_test

import (
	"testing"

	"posthaste/sql"
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
		s, err := sql.ParseSnapshot(c.snap)
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		if got := s.Visible(c.xid); got != c.want {
			t.Errorf("%s: Visible(%d) in %s = %v, want %v", c.name, c.xid, c.snap, got, c.want)
		}
	}
	for _, bad := range []string{"", "1:2", "x:2:", "1:y:", "1:2:z", "1:2:3:4"} {
		if _, err := sql.ParseSnapshot(bad); err == nil {
			t.Errorf("ParseSnapshot(%q) gave no error", bad)
		}
	}
}
