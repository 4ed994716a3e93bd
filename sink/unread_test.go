package sink_test

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// What a change of the streams per type waits for: a group that has not read everything, or not acknowledged it, also
// where Redis does not know how much that is; and a stream that a group may not have found yet.
func TestUnread(t *testing.T) {
	servers(t, func(t *testing.T, f *fixture, _ bool) {
		unread := func() (found []string) {
			t.Helper()
			list, err := f.sink.Unread(t.Context(), []string{"missing", "string", stream})
			f.must(err)
			for _, u := range list {
				if u.Stream != stream {
					t.Errorf("%+v", u)
				}
				found = append(found, fmt.Sprintf("%s %d", u.Group, u.Entries))
			}
			slices.Sort(found)
			return found
		}
		want := func(what string, want ...string) {
			t.Helper()
			if got := unread(); !slices.Equal(got, want) {
				t.Errorf("%s: %q, want %q", what, got, want)
			}
		}
		f.do("SET", "string", "x")
		want("nothing is there")
		f.ago(time.Hour, 10)
		want("nobody reads")
		f.do("XGROUP", "CREATE", stream, "g", "0")
		want("nothing is read", "g 10")
		f.do("XREADGROUP", "GROUP", "g", "c", "COUNT", 10, "STREAMS", stream, ">")
		want("nothing is acknowledged", "g 10")
		ids := f.client.XRange(t.Context(), stream, "-", "+").Val()
		for _, e := range ids[1:] {
			f.do("XACK", stream, "g", e.ID)
		}
		want("one is not acknowledged", "g 1")
		f.do("XACK", stream, "g", ids[0].ID)
		want("all is acknowledged")
		f.do("XGROUP", "CREATE", stream, "h", ids[4].ID)
		f.do("XDEL", stream, ids[7].ID) // from now on Redis does not know how much is before it
		if got := unread(); len(got) != 1 || got[0] == "h 0" {
			t.Errorf("what Redis cannot count: %q", got)
		}
		f.do("XGROUP", "SETID", stream, "h", "$")
		want("who begins at the end")

		f.do("DEL", stream)
		f.do("XADD", stream, "*", "a", "b")
		want("a stream that is new", " 1")
	})
}

// A type that has several streams is marked as such, again and again.
func TestSharded(t *testing.T) {
	servers(t, func(t *testing.T, f *fixture, _ bool) {
		for range 2 {
			f.must(f.sink.Sharded(t.Context(), "outbox.order"))
		}
		if v := f.client.Get(t.Context(), "outbox.order#sharded").Val(); v != "1" {
			t.Errorf("the mark is %q", v)
		}
	})
}
