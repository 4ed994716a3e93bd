package sink_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/lab/testenv"
	"posthaste/outbox"
)

// A change of the streams per type waits for groups that have not read or acknowledged everything, even if Redis does
// not know how much that is, and for streams that a group may not have found yet.
func TestUnread(t *testing.T) {
	servers(t, func(t *testing.T, f *fixture, _ bool) {
		unread := func() (found []string) {
			t.Helper()
			list, err := f.sink.Unread(t.Context(), f.Source, []string{"missing", "string", stream})
			f.Must(err)
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

// In a stream that several databases share, a change only waits for entries of its own database, because the others
// keep publishing.
func TestUnreadOfASharedStream(t *testing.T) {
	t.Parallel()
	all := sharing(t, 2)
	a, b := all[0], all[1]
	la, lb := a.lane(a.adopted(1)), b.lane(b.adopted(1))
	events := makeEvents(6)
	want := func(what string, f *fixture, want ...string) {
		t.Helper()
		var got []string
		testenv.Eventually(t, 20*time.Second, func() error { // the stream is new at first
			list, err := f.sink.Unread(t.Context(), f.Source, []string{stream})
			f.Must(err)
			got = nil
			for _, u := range list {
				if u.Group == "" {
					return errors.New("it is new")
				}
				got = append(got, u.Group)
			}
			return nil
		})
		if !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", what, got, want)
		}
	}
	b.do("XGROUP", "CREATE", stream, "g", "0", "MKSTREAM")
	b.wantLast(b.Publish(lb, events[0]))
	if list, err := a.sink.Unread(t.Context(), a.Source, []string{stream}); err != nil || len(list) > 0 {
		t.Errorf("of one that has published nothing: %+v, %v", list, err)
	}
	a.wantLast(a.Publish(la, events[1]))
	b.wantLast(b.Publish(lb, events[2]))
	want("nothing is read", a, "g")
	read := func(n int) (ids []string) {
		for _, e := range a.client.XReadGroup(t.Context(), &redis.XReadGroupArgs{
			Group: "g", Consumer: "c", Streams: []string{stream, ">"}, Count: int64(n),
		}).Val()[0].Messages {
			ids = append(ids, e.ID)
		}
		return ids
	}
	ids := read(2)
	want("ours is not acknowledged", a, "g")
	a.do("XACK", stream, "g", ids[1])
	want("what is before it is not", a, "g")
	a.do("XACK", stream, "g", ids[0])
	want("all is, but for what others have published since", a)
	want("theirs is not", b, "g")
}

// A new stream gets the groups of the others, from its first entry on. Repeats change nothing.
func TestFollow(t *testing.T) {
	servers(t, func(t *testing.T, f *fixture, _ bool) {
		f.do("SET", "string", "x")
		f.ago(time.Hour, 2)
		f.do("XGROUP", "CREATE", stream, "read", "$")
		f.do("XGROUP", "CREATE", stream, "h", "0")
		const fresh = "outbox.fresh"
		for range 2 {
			f.Must(f.sink.Follow(t.Context(), fresh, []string{"missing", "string", stream}))
		}
		f.do("XADD", fresh, "*", "a", "b")
		groups := f.client.XInfoGroups(t.Context(), fresh).Val()
		var names []string
		for _, g := range groups {
			names = append(names, fmt.Sprintf("%s %s", g.Name, g.LastDeliveredID))
		}
		slices.Sort(names)
		if want := []string{"h 0-0", "read 0-0"}; !slices.Equal(names, want) {
			t.Errorf("groups %q, want %q", names, want)
		}
	})
}

// Groups lists the groups of a stream while it has all that its gate has let through. They are restored at the first
// entry; repeats change nothing. Entries trimmed before count as read.
func TestGroupsOfAStreamThatIsLost(t *testing.T) {
	servers(t, func(t *testing.T, f *fixture, _ bool) {
		o := f.adopted(1)
		list := func(o outbox.Owner) string {
			t.Helper()
			groups, err := f.sink.Groups(t.Context(), o, []string{"missing", stream})
			f.Must(err)
			return fmt.Sprint(groups)
		}
		want := func(what, got, want string) {
			t.Helper()
			if got != want {
				t.Errorf("%s: %s, want %s", what, got, want)
			}
		}
		want("no stream", list(o), "map["+stream+":[]]")
		f.Publish(f.lane(o), makeEvent(), makeEvent())
		for _, group := range []string{"g", "no text: \xff", "h", "nor this: \x00"} {
			f.do("XGROUP", "CREATE", stream, group, "$")
		}
		want("a stream", list(o), "map["+stream+":[g h]]")
		want("another owner", list(f.Owner(2)), "map[]")
		f.do("XGROUP", "DESTROY", stream, "g")
		f.do("XTRIM", stream, "MAXLEN", 1)
		for range 2 {
			f.Must(f.sink.Regroup(t.Context(), stream, []string{"g", "h"}))
		}
		for _, g := range f.client.XInfoGroups(t.Context(), stream).Val() {
			if g.Name == "g" && (g.LastDeliveredID != "0-0" || g.EntriesRead != 1 || g.Lag != 1) {
				t.Errorf("%+v", g)
			}
		}
		f.do("DEL", stream)
		want("a stream that is gone", list(o), "map[]")
		f.Must(f.sink.Regroup(t.Context(), stream, []string{"g"}))
		want("one that somebody has made again", list(o), "map[]")
		f.do("SET", "string", "x")
		f.Must(f.sink.Regroup(t.Context(), "string", []string{"g"}))
	})
}

// A type with several streams is marked as such. Repeats change nothing.
func TestSharded(t *testing.T) {
	servers(t, func(t *testing.T, f *fixture, _ bool) {
		for range 2 {
			f.Must(f.sink.Sharded(t.Context(), "outbox.order"))
		}
		if v := f.client.Get(t.Context(), "outbox.order#sharded").Val(); v != "1" {
			t.Errorf("the mark is %q", v)
		}
	})
}
