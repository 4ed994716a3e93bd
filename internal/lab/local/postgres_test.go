package local_test

import (
	"context"
	"net/url"
	"os"
	"testing"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"posthaste/internal/lab/local"
	"posthaste/sql"
)

// A superuser may run programs as the server's user, so other users of the machine must not become one.
func TestPostgresAsksForThePassword(t *testing.T) {
	t.Parallel()
	bin, err := local.PostgresBin(t.Context(), os.Getenv("POSTHASTE_TEST_PG_BIN"))
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "posthaste-pg-") // the server's user needs to pass through
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	pg, err := local.StartPostgres(t.Context(), bin, dir, "fsync=off")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pg.Stop("immediate") })
	connect := func(u *url.URL) error {
		c, err := pgx.Connect(t.Context(), u.String())
		if err == nil {
			_ = c.Close(context.Background())
		}
		return err
	}
	u, err := url.Parse(pg.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	if err := connect(u); err != nil {
		t.Errorf("with the password: %v", err)
	}
	u.User = url.UserPassword("postgres", "wrong")
	if got := sql.SQLState(connect(u)); got != pgerrcode.InvalidPassword {
		t.Errorf("with another password: %q", got)
	}
}
