package containers_test

import (
	"fmt"
	"os"
	"testing"
)

// TestMain goes to the root of the repository, which all names are relative to.
func TestMain(m *testing.M) {
	if err := os.Chdir(".."); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}
