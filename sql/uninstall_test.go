package sql_test

import (
	"testing"

	"posthaste/internal/testenv"
	"posthaste/sql"
)

func TestUninstall(t *testing.T) {
	t.Parallel()
	d := testenv.Postgres(t)
	must(t, sql.Uninstall(t.Context(), d.Pool, "posthaste", false, nil))
	if n := testenv.Value[int](t, d, "SELECT count(*) FROM pg_publication"); n != 0 {
		t.Error("the publication is there")
	}
	must(t, sql.CheckSchema(t.Context(), d.Pool))
	must(t, sql.Uninstall(t.Context(), d.Pool, "posthaste", true, nil))
	if got := testenv.Value[string](t, d,
		`SELECT coalesce(string_agg(relname, ' '), '') FROM pg_class
		WHERE relnamespace = 'public'::regnamespace`); got != "" {
		t.Errorf("left: %s", got)
	}
	must(t, sql.Uninstall(t.Context(), d.Pool, "posthaste", true, nil))
}
