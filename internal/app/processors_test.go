package app_test

import (
	"os"
	"runtime"
	"testing"

	"posthaste/internal/app"
	"posthaste/internal/testenv"
)

func TestOneProcessor(t *testing.T) {
	const name = "GOMAXPROCS"
	before := runtime.GOMAXPROCS(3)
	defer runtime.GOMAXPROCS(before)
	t.Setenv(name, "3")
	undo := app.OneProcessor()
	testenv.Equal(t, "processors that the environment names", runtime.GOMAXPROCS(0), 3)
	undo()
	_ = os.Unsetenv(name) // Setenv restores it
	undo = app.OneProcessor()
	testenv.Equal(t, "processors", runtime.GOMAXPROCS(0), 1)
	undo()
	testenv.Equal(t, "processors after all", runtime.GOMAXPROCS(0), 3)
}
