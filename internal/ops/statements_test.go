package ops_test

import (
	"testing"

	"posthaste/internal/testenv"
)

func TestEveryQueryPrepares(t *testing.T) {
	t.Parallel()
	testenv.Postgres(t).PrepareAll(t, "queries")
}
