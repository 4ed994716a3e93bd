package ops_test

import (
	"os"
	"testing"

	"posthaste/internal/testenv"
)

func TestMain(m *testing.M) { os.Exit(testenv.Main(m)) }

// must ends the test if err is not nil.
func must(tb testing.TB, err error) {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
}
