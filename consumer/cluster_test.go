package consumer_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/consumer"
	"posthaste/internal/testenv"
)

// In a cluster every stream is read by itself, and a dead event stays in its stream's slot, so that the move is atomic
// there too. One node with all slots refuses what crosses slots just as several would.
func TestCluster(t *testing.T) {
	t.Parallel()
	r := testenv.Redis(t, "cluster-enabled yes")
	must(t, r.Client.Do(t.Context(), "CLUSTER", "ADDSLOTSRANGE", 0, 16383).Err())
	testenv.Eventually(t, 20*time.Second, func() error { return r.Client.Set(t.Context(), "probe", 1, 0).Err() })
	client := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{r.Addr()}})
	defer client.Close()
	for _, ordered := range []bool{false, true} {
		var want []string
		for i := range 60 {
			ev := event{fmt.Sprintf("%v-%d", ordered, i), fmt.Sprintf("s%d", i%5), i}
			want = append(want, ev.id)
			add(t, client, []string{"outbox.order", "outbox.user", "outbox.order.3"}[i%3], ev)
		}
		group := fmt.Sprintf("g-%v", ordered)
		var f failing
		f.ids.Store(want[0], consumer.Permanent(errBoom))
		c := start(t, consumer.Options{
			Client: client, Group: group, Prefix: "outbox.", Ordered: ordered, Handler: f.run,
		})
		settled(t, client, 20*time.Second, group, "outbox.order", "outbox.user", "outbox.order.3")
		must(t, c.stop())
		got := f.times()
		for _, id := range want[1:] {
			testenv.Equal(t, "runs of event "+id, got[id], 1)
		}
		list := dead(t, client)
		i := slices.IndexFunc(list, func(d consumer.DeadEntry) bool { return d.Group == group && d.EventID == want[0] })
		if i < 0 || list[i].DeadStream != "dead.{outbox.order}" || list[i].Stream != "outbox.order" {
			t.Fatalf("dead: %+v", list)
		}
		must(t, consumer.Retry(t.Context(), client, list[i]))
	}
}
