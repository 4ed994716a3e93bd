package local_test

import (
	"context"
	"net/url"
	"os"
	"testing"

	"github.com/jackc/pgerrcode"
	"github.com/jackc/pgx/v5"

	"posthaste/internal/local"
	"posthaste/sql"
)

// A superuser may run programs as whoever runs the server: nobody else on the machine becomes one, by TCP or socket.
func TestPostgresAsksForThePassword(t *testing.T) {
	t.Parallel()
	bin, err := local.PostgresBin(t.Context(), os.Getenv("POSTHASTE_TEST_PG_BIN"))
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "posthaste-pg-") // the server's user must be able to pass through
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	pg, err := local.StartPostgres(t.Context(), bin, dir, "fsync=off")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pg.Stop("immediate") })
	connect := func(u url.URL) error {
		c, err := pgx.Connect(t.Context(), u.String())
		if err == nil {
			_ = c.Close(context.Background())
		}
		return err
	}
	tcp, err := url.Parse(pg.URL("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	socket := *tcp
	socket.Host = ""
	socket.RawQuery += "&host=" + url.QueryEscape(dir) + "&port=" + tcp.Port()
	for name, u := range map[string]url.URL{"tcp": *tcp, "socket": socket} {
		if err := connect(u); err != nil {
			t.Errorf("%s: with the password: %v", name, err)
		}
		u.User = url.UserPassword("postgres", "wrong")
		if got := sql.SQLState(connect(u)); got != pgerrcode.InvalidPassword {
			t.Errorf("%s: with another password: %q", name, got)
		}
	}
}
