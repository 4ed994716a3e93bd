package credits

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/uuid"

	"posthaste/internal/testenv"
	"posthaste/sql"
)

// Two databases on one Redis: the second neither changes the first's balances nor takes its operations.
func TestTheBalancesOfAnotherDatabase(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	second := &world{tb: t, db: testenv.Postgres(t), redis: w.redis}
	second.bank, second.sync = second.newBank(), second.newSync()
	for _, d := range []*testenv.Database{w.db, second.db} {
		if err := sql.Register(t.Context(), d.Pool, d.Relay); err != nil {
			t.Fatal(err)
		}
	}
	user := w.funded(100)
	// What a copy of the database would be: it has used credits, and the same user.
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
	if err := TakeOver(t.Context(), w.redis.Client, source); err != nil {
		t.Fatal(err)
	}
	if _, err := w.newBank().Apply(t.Context(), newOp(user, Deduct, 1)); !errors.Is(err, ErrUnavailable) {
		t.Errorf("a deduction for the first after the second has taken over: %v", err)
	}
}

// Who serves may have no right to look who it is, or no Postgres: that does not close the credits of the right
// database.
func TestTheOwnerThatCannotLook(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	if err := sql.Register(t.Context(), w.db.Pool, w.db.Relay); err != nil {
		t.Fatal(err)
	}
	user := w.funded(100)
	if owner, err := Owner(t.Context(), w.redis.Client); owner == "" || err != nil {
		t.Fatalf("owner %q, %v", owner, err)
	}
	w.db.Exec(t, "ALTER TABLE relay_state RENAME TO hidden")
	// The sync writes what it takes for its own: it wants to know.
	if _, err := w.newSync().round(t.Context()); !errors.Is(err, errOwnerUnknown) {
		t.Errorf("the sync of nobody knows whom: %v", err)
	}
	if _, err := w.newBank().Apply(t.Context(), newOp(user, Deduct, 1)); err != nil {
		t.Error(err)
	}
}

// A copy on another server does not know who it is until its relay has told it, and takes nothing that has an owner.
func TestTheBalancesOfTheOriginal(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	if err := sql.Register(t.Context(), w.db.Pool, w.db.Relay); err != nil {
		t.Fatal(err)
	}
	user := w.funded(100)
	w.settle()
	w.db.Exec(t, "UPDATE relay_state SET system_identifier = 1")
	bank := w.newBank()
	for range 2 {
		if _, err := bank.Apply(t.Context(), newOp(user, Deduct, 1)); !errors.Is(err, ErrUnavailable) {
			t.Errorf("got %v, want ErrUnavailable", err)
		}
		if err := sql.Identify(t.Context(), w.db.Pool); err != nil { // as the copy's relay does
			t.Fatal(err)
		}
		bank = w.newBank()
	}
}
