package credits

import (
	"strings"
	"testing"

	"github.com/google/uuid"

	"posthaste/internal/lab/testenv"
)

// Each level reports success only after its wait, and the reply names the level.
func TestDurabilityReplicas(t *testing.T) {
	t.Parallel()
	w := newPair(t)
	b := w.newBank(func(o *Options) { o.Durability = Durability{Replicas: 1} })
	user := w.funded(100)
	r := w.insist(b, newOp(user, Add, 1)) // the first synchronization is slow
	testenv.Equal(t, "durability", r.Durability, durReplicated)
	// The link hangs: the operation is carried out, but is not on the replica.
	w.link.Set(testenv.Trouble{LoseReplies: true})
	op := newOp(user, Deduct, 10)
	w.refusedBy(b, op, ErrUnknown)
	// A repeated operation also waits, even in another process. It must not return just because it has nothing to
	// write.
	other := w.newBank(func(o *Options) { o.Durability = Durability{Replicas: 1} })
	w.refusedBy(other, op, ErrUnknown)
	w.link.Set(testenv.Trouble{})
	w.link.Down()
	w.link.Up()
	r = w.insist(b, op)
	if !r.Replayed || r.Outcome != OK {
		t.Errorf("got %+v, want a replay", r)
	}
}

// An operation acknowledged as fsynced survives kill -9. Without WAITAOF or without the append-only file, every
// operation is refused.
func TestDurabilityAOF(t *testing.T) {
	t.Parallel()
	w := &world{tb: t, db: testenv.Postgres(t), redis: testenv.Valkey(t)}
	w.bank, w.sync = w.newBank(func(o *Options) { o.Durability = Durability{AOF: true} }), w.newSync()
	user := uuid.New()
	w.durable(newOp(user, Add, 100), OK)
	for range 5 {
		r := w.durable(newOp(user, Deduct, 1), OK)
		testenv.Equal(t, "durability", r.Durability, durFsynced)
		must(t, w.redis.Kill())
		must(t, w.redis.Start(t.Context()))
		got := w.durable(newOp(user, Deduct, 1000), Insufficient) // a loss would make the floor refuse this
		testenv.Equal(t, "balance", got.Balance, r.Balance)
	}
	w.inStep(user, 95)
	testenv.Equal(t, "rebuilt buckets", reading(w.sync.metrics.bumps), 0)

	old := newWorld(t) // Redis 7.0 has no WAITAOF
	if strings.HasPrefix(old.redis.Client.InfoMap(t.Context(), "server").Item("Server", "redis_version"), "7.0.") {
		b := old.newBank(func(o *Options) { o.Durability = Durability{AOF: true} })
		old.refusedBy(b, newOp(user, Add, 1), ErrUnavailable)
	}
	w.redis.Client.ConfigSet(t.Context(), "appendonly", "no")
	b := w.newBank(func(o *Options) { o.Durability = Durability{AOF: true} })
	w.refusedBy(b, newOp(user, Add, 1), ErrUnavailable) // without a file
}

// Without durability, operations that Redis loses in a crash are given up and counted. There are no other effects.
func TestDurabilityNone(t *testing.T) {
	t.Parallel()
	w := newWorld(t, "appendonly no")
	user := w.funded(100)
	w.settle()
	testenv.Equal(t, "durability", w.must(newOp(user, Deduct, 30), OK).Durability, durMemory)
	must(t, w.redis.Kill())
	must(t, w.redis.Start(t.Context()))
	w.closedFor(w.bank, user)
	w.inStep(user, 100)
	testenv.Equal(t, "lost operations", reading(w.sync.metrics.lost), 1)
}
