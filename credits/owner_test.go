package credits

import (
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/google/uuid"

	"posthaste/internal/lab/testenv"
	"posthaste/sql"
)

// Two databases use one Redis: the second one neither changes the first one's balances nor reads its operations.
func TestTheBalancesOfAnotherDatabase(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	second := &world{tb: t, db: testenv.Postgres(t), redis: w.redis}
	second.bank, second.sync = second.newBank(), second.newSync()
	for _, d := range []*testenv.Database{w.db, second.db} {
		must(t, sql.Register(t.Context(), d.Pool, d.Relay))
	}
	user := w.funded(100)
	// The second database resembles a copy: it has used credits and has the same user.
	second.db.Exec(t, "INSERT INTO credit_epoch (bucket) VALUES ($1)", Bucket(user))
	_, err := second.bank.Apply(t.Context(), newOp(user, Deduct, 1))
	if !errors.Is(err, ErrUnavailable) || !errors.Is(err, ErrForeign) || !strings.Contains(err.Error(), ForeignRemedy) {
		t.Errorf("a deduction for the second database: %v", err)
	}
	if n, err := second.sync.round(t.Context()); n != 0 || !errors.Is(err, ErrForeign) {
		t.Errorf("the second took %d operations, %v", n, err)
	}
	w.settle()
	w.inStep(user, 100)

	source, err := ledgerOwner(t.Context(), second.db.Pool)
	if err != nil || uuid.Validate(source) != nil {
		t.Fatalf("source %q, %v", source, err)
	}
	must(t, TakeOver(t.Context(), w.redis.Client, source))
	w.refusedBy(w.newBank(), newOp(user, Deduct, 1), ErrUnavailable)
}

// A process may have no right to read its database's source, or no Postgres. The credits of the right database stay
// available.
func TestTheOwnerThatCannotLook(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	must(t, sql.Register(t.Context(), w.db.Pool, w.db.Relay))
	user := w.funded(100)
	if owner, err := Owner(t.Context(), w.redis.Client); owner == "" || err != nil {
		t.Fatalf("owner %q, %v", owner, err)
	}
	w.db.Exec(t, "ALTER TABLE relay_state RENAME TO hidden")
	// The sync writes to the ledger, so it requires the source.
	_, err := w.newSync().round(t.Context())
	testenv.ErrorIs(t, "the sync of nobody knows whom", err, errOwnerUnknown)
	_, err = w.newBank().Apply(t.Context(), newOp(user, Deduct, 1))
	must(t, err)
}

// A copy on another server has no source until its relay has set one. Until then it uses no balances that have an
// owner.
func TestTheBalancesOfTheOriginal(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	must(t, sql.Register(t.Context(), w.db.Pool, w.db.Relay))
	user := w.funded(100)
	w.settle()
	w.db.Exec(t, "UPDATE relay_state SET system_identifier = 1")
	bank := w.newBank()
	for range 2 {
		w.refusedBy(bank, newOp(user, Deduct, 1), ErrUnavailable)
		if err := sql.Identify(t.Context(), w.db.Pool); err != nil { // as the copy's relay does
			t.Fatal(err)
		}
		bank = w.newBank()
	}
}

// Servers that are met at the same time are compared with marks that one read has returned. Each comparison adds what
// this process knows, to marks of its own.
func TestComparisonsShareARead(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for range 20 {
		w.must(newOp(uuid.New(), Add, 1), OK)
	}
	w.settle()
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			cn := w.redis.Client.Conn()
			defer cn.Close()
			testenv.ErrorIs(t, "the comparison", w.bank.compare(t.Context(), cn), nil)
		})
	}
	wg.Wait()
}
