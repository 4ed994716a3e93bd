package console

import (
	"strconv"
	"testing"
	"time"

	"posthaste/internal/ops"
	"posthaste/sink"
)

// Redis may have thousands of groups, and every page requests the state every second.
func TestManyGroupsAreBounded(t *testing.T) {
	t.Parallel()
	var groups []sink.Group
	for i := range 1000 {
		groups = append(groups, sink.Group{
			Stream: "outbox.order", Name: strconv.Itoa(i), Lag: 5, Pending: 1, Idle: time.Duration(i) * time.Minute,
		})
	}
	groups[999].Lost = 7
	for i := range groups {
		groups[i].Streams = make([]sink.Group, 17)
	}
	list, sum := sumUp(groups)
	if len(list) != maxGroups || list[0].Name != "999" || ops.StateOf(list[1]) != ops.Abandoned ||
		sum != (GroupSum{Groups: 1000, Unread: 5000, Pending: 1000}) {
		t.Errorf("%d groups from %s, %+v", len(list), list[0].Name, sum)
	}
	on := 0
	for _, g := range list {
		on += len(g.Streams)
	}
	if on != maxShards || len(list[0].Streams) != 17 {
		t.Errorf("they are on %d streams, the first on %d", on, len(list[0].Streams))
	}
}
