package ops_test

import (
	"os"
	"testing"

	"posthaste/internal/lab/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

var must = testenv.Must

func TestEveryQueryPrepares(t *testing.T) {
	t.Parallel()
	testenv.Postgres(t).PrepareAll(t, "queries")
}
