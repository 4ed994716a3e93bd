package deploy

import (
	"fmt"
	"os"
	"testing"
)

// TestMain goes to the folder deploy, which all names are relative to.
func TestMain(m *testing.M) {
	if err := os.Chdir("../../deploy"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}
