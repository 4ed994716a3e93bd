package testenv_test

import (
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"posthaste/internal/local"
	"posthaste/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

// Keys move from node to node, a node is added, and another one is removed: tests of clusters depend on that.
func TestClusterMovesSlots(t *testing.T) {
	t.Parallel()
	c := testenv.Cluster(t, 3, 0, "cluster-node-timeout 15000")
	const key = "a"
	slot := c.Slot(t, key)
	from := c.Master(t, slot)
	if err := c.Client.Set(t.Context(), key, "1", 0).Err(); err != nil {
		t.Fatal(err)
	}
	to := (from + 1) % 3
	c.Move(t, slot, to)
	if v, err := c.On(t, to).Get(t.Context(), key).Result(); v != "1" || err != nil {
		t.Errorf("the new owner has %q, %v", v, err)
	}
	added, err := c.Add(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	c.Drain(t, to, added)
	if err := c.Wait(t.Context()); err != nil { // until then some nodes may not know all slots
		t.Fatal(err)
	}
	if got := c.Master(t, slot); got != added {
		t.Errorf("the slot is with node %d, want %d", got, added)
	}
	if v, err := c.On(t, added).Get(t.Context(), key).Result(); v != "1" || err != nil {
		t.Errorf("the added node has %q, %v", v, err)
	}
}

// A node that is cut off is replaced, takes writes until it notices that, and returns as a replica.
func TestClusterIsCut(t *testing.T) {
	t.Parallel()
	c := testenv.FencedCluster(t, 3, 1, "cluster-node-timeout 1500")
	const key = "a"
	slot := c.Slot(t, key)
	old := c.Master(t, slot)
	c.Cut(old)
	if err := c.On(t, old).Set(t.Context(), key, "1", 0).Err(); err != nil {
		t.Errorf("the node takes no writes: %v", err)
	}
	other := c.On(t, (old+1)%3)
	testenv.Eventually(t, 30*time.Second, func() error {
		if now, err := c.MasterBy(t.Context(), other, slot); err != nil || now == old {
			return fmt.Errorf("not replaced: %w", err)
		}
		return nil
	})
	testenv.Eventually(t, 30*time.Second, func() error {
		if err := c.On(t, old).Set(t.Context(), key, "2", 0).Err(); err == nil {
			return errors.New("it takes writes still")
		}
		return nil
	})
	c.Join(old)
	if err := c.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	if v := c.Client.Get(t.Context(), key).Val(); v != "" {
		t.Errorf("%q is there, which no replica had", v)
	}
}

func TestSentinelReplaces(t *testing.T) {
	t.Parallel()
	s := testenv.SentinelOf(t, local.SentinelOptions{
		Replicas: 1, Sentinels: 3, Access: local.Access{User: "u", Password: "p"},
		SentinelUser: "v", SentinelPassword: "q",
	})
	o, err := redis.ParseFailoverURL(s.URL())
	if err != nil {
		t.Fatal(err)
	}
	client := redis.NewFailoverClient(o)
	defer client.Close()
	if err := client.Set(t.Context(), "a", "1", 0).Err(); err != nil {
		t.Fatal(err)
	}
	master, err := s.Master(t.Context())
	if err != nil || master != 0 {
		t.Fatalf("the master is %d, %v", master, err)
	}
	if err := s.Servers[0].Kill(); err != nil {
		t.Fatal(err)
	}
	s.Promoted(t, 0)
	testenv.Eventually(t, 20*time.Second, func() error { return client.Set(t.Context(), "a", "2", 0).Err() })
	if err := s.Servers[0].Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := s.Wait(t.Context()); err != nil {
		t.Error(err)
	}
}

// A slot whose owner names another node, which names the owner, is served again.
func TestALostSlotIsServedAgain(t *testing.T) {
	t.Parallel()
	c := testenv.Cluster(t, 3, 0, "cluster-node-timeout 15000")
	testenv.Must(t, c.Client.Set(t.Context(), "k", "v", 0).Err())
	slot := c.Slot(t, "k")
	was := c.Master(t, slot)
	other := (was + 1) % 3
	c.BeginMove(t, slot, other)
	c.MoveKeys(t, slot, was, other, 10)
	testenv.Must(t, c.Do(t.Context(), other, "CLUSTER", "SETSLOT", slot, "STABLE"))
	testenv.Must(t, c.Do(t.Context(), was, "CLUSTER", "SETSLOT", slot, "NODE", c.IDs[other]))
	if now := c.Master(t, slot); now != other {
		t.Errorf("node %d serves the slot, and %d has its keys", now, other)
	}
}
