package testenv_test

import (
	"os"
	"testing"

	"posthaste/internal/lab/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

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

// Each server has its own system identifier, although all of them have the same files.
func TestServersAreNumbered(t *testing.T) {
	t.Parallel()
	const id = "SELECT system_identifier FROM pg_control_system()"
	one := testenv.Value[int64](t, testenv.NewServer(t).Empty(t), id)
	if other := testenv.Value[int64](t, testenv.NewServer(t).Empty(t), id); one == other || one <= 0 || other <= 0 {
		t.Errorf("two servers have the identifiers %d and %d", one, other)
	}
}
